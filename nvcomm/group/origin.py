# SPDX-License-Identifier: Apache-2.0
"""Which group a program means: that of a launcher, of torch.distributed, of MPI, or one of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from nvcomm.env import other
from nvcomm.errors import GroupError, UsageError
from nvcomm.group.begin import fresh_group, reached
from nvcomm.group.contract import DEFAULT_TIMEOUT_S, Group
from nvcomm.group.mpi import from_mpi, mpi_world
from nvcomm.group.store_group import StoreGroup


def as_group(group: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Group:
    """`group` itself; of a process group or an mpi4py communicator its ranks.

    Of None torch's default group where there is one, else the ranks of the launcher, see `started_by`.

    Args:
        group: what the caller has.
        timeout_s: bound of the wait for the others' store. `DEFAULT_TIMEOUT_S` where it is less: programs start
            seconds apart, whatever they ask of each other later.

    Raises:
        UsageError, UnsupportedError, GroupError: as `from_process_group`, `mpi_world`, `from_mpi`, `from_environment`.
    """
    bound_s = max(timeout_s, DEFAULT_TIMEOUT_S)
    if group is None and dist.is_initialized():
        return from_process_group(None, bound_s)
    if group is None and started_by() == "mpi":
        return from_mpi(mpi_world(), bound_s)
    if group is None:
        return from_environment(bound_s)
    if isinstance(group, dist.ProcessGroup):
        return from_process_group(group, bound_s)
    if hasattr(group, "Iallgather"):
        return from_mpi(group, bound_s)
    if not all(hasattr(group, name) for name in ("rank", "world_size", "exchange", "barrier")):
        raise UsageError(
            f"group is {group!r}; wanted a torch.distributed process group, an mpi4py communicator, an "
            "nvcomm.group.Group, or None for the ranks of torchrun or mpiexec."
        )
    ranks: Group = group
    return ranks


def started_by() -> Literal["torchrun", "mpi"] | None:
    """What started this process. torchrun counts first: under an mpiexec per host its ranks are the ones meant."""
    if other("RANK") is not None and other("WORLD_SIZE") is not None:
        return "torchrun"
    if any(other(name) is not None for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        return "mpi"
    return None


def from_process_group(
    process_group: dist.ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> StoreGroup:
    """A group of the ranks of a `torch.distributed` process group, through the store that it was built with.

    Args:
        process_group: None is the default group. Every rank builds its groups on it in the same order.
        timeout_s: bound of the wait for the store.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in the group.
        GroupError: its store fails, or does not answer within `timeout_s`.
    """
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised: call torch.distributed.init_process_group first.")
    wanted = process_group or dist.group.WORLD
    rank = dist.get_rank(wanted)
    if wanted is None or rank < 0:
        raise UsageError("this process is not a rank of the process group: build the communicator on its ranks only.")
    # The one place that needs it: PyTorch has no public name for the store of a process group.
    store = dist.distributed_c10d._get_process_group_store(wanted)
    return fresh_group(store, rank, dist.get_world_size(wanted), timeout_s)


def from_environment(timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreGroup:
    """A group of the processes that torchrun started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: a variable is missing or no number.
        GroupError: the store at MASTER_ADDR cannot be reached within `timeout_s`.
    """
    try:
        store, rank, world_size = reached(
            lambda: _store_of_environment(timeout_s), "the store of MASTER_ADDR and MASTER_PORT", timeout_s
        )
    except ValueError as error:
        raise UsageError(
            f"{error}. Start the program with torchrun or mpiexec, or set what torchrun sets: numbers in RANK, "
            "WORLD_SIZE and MASTER_PORT, a host in MASTER_ADDR."
        ) from error
    except RuntimeError as error:
        raise GroupError(
            f"the store of MASTER_ADDR and MASTER_PORT was not reached: {error}. Find out whether rank 0 runs there."
        ) from error
    return fresh_group(store, rank, world_size, timeout_s, serves=_serves_store())


def _serves_store() -> bool:
    """Whether this process serves the store of MASTER_ADDR and MASTER_PORT: rank 0, unless torchrun's agent does."""
    return other("RANK") == "0" and other("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _store_of_environment(timeout_s: float) -> tuple[dist.Store, int, int]:
    """(store, rank, world size), as torch builds them; but rank 0, where it serves the store itself, waits for nobody.

    In vain it could not say for whom. The first exchange can.
    """
    timeout = timedelta(seconds=timeout_s)
    count, host, port = (other(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not (_serves_store() and count and host and port) or not 0 <= int(port) < 1 << 16:
        return next(dist.rendezvous("env://", timeout=timeout))
    store = dist.TCPStore(
        host, int(port), int(count), is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
    return store, 0, int(count)
