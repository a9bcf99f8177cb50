# SPDX-License-Identifier: Apache-2.0
"""A group of the ranks of an MPI program. MPI carries an address once; a store does the rest."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nvcomm.env import other
from nvcomm.errors import GroupError, UnsupportedError, UsageError
from nvcomm.group.begin import fresh_group, reached
from nvcomm.group.contract import DEFAULT_TIMEOUT_S
from nvcomm.group.pauses import pauses
from nvcomm.group.store_group import StoreGroup


def mpi_world() -> Any:
    """mpi4py's communicator of all ranks that an MPI launcher started.

    Raises:
        UnsupportedError: mpi4py is not installed, or finds no MPI.
        UsageError: the launcher is of another MPI than mpi4py's, so that each rank believes to be alone.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"an MPI launcher started this process, and mpi4py cannot be used: {error}. Install it and an MPI: "
            "pip install 'nvcomm[mpi]' mpich; or start the program with torchrun."
        ) from error
    started = next((size for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if (size := other(name))), "1")
    if MPI.COMM_WORLD.Get_size() == 1 and started != "1":
        raise UsageError(
            f"mpiexec started {started} ranks, and MPI says that this one is alone: mpiexec and mpi4py are of "
            "different MPIs. Take the mpiexec of the MPI that `python -m mpi4py --mpi-lib-version` names."
        )
    return MPI.COMM_WORLD


def from_mpi(comm: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreGroup:
    """A group of the ranks of an mpi4py communicator. MPI carries an address once; a TCPStore of rank 0 does the rest.

    The store listens on a free port of rank 0's host (PyTorch binds every interface of it) and ends with rank 0.

    Args:
        comm: `mpi4py.MPI.Comm`.

    Raises:
        GroupError: a rank did not answer within `timeout_s`, or the store cannot be built or reached.
    """
    rank, world_size = int(comm.Get_rank()), int(comm.Get_size())
    deadline = time.monotonic() + timeout_s
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().ljust(64)[:64]
    boot_ids = bytearray(64 * world_size)
    _mpi_wait(comm.Iallgather(boot_id, boot_ids), deadline, rank)
    same_host = bytes(boot_ids) == boot_id * world_size
    store: dist.Store | None = None
    answer: dict[str, Any] = {}
    if rank == 0:
        host = "127.0.0.1" if same_host else _own_address()
        try:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
            answer = {"host": host, "port": store.port}
        except RuntimeError as error:
            answer = {"error": str(error)[:256]}
    buffer = bytearray(json.dumps(answer).encode().ljust(1024))
    _mpi_wait(comm.Ibcast(buffer, root=0), deadline, rank)
    answer = json.loads(buffer)
    if "error" in answer:
        raise GroupError(f"rank 0 could not build a store: {answer['error']}")
    if store is None:
        left_s = max(deadline - time.monotonic(), 0.001)
        left, host, port = timedelta(seconds=left_s), answer["host"], answer["port"]
        try:
            store = reached(
                lambda: dist.TCPStore(host, port, is_master=False, timeout=left), f"rank 0's store at {answer}", left_s
            )
        except RuntimeError as error:
            raise GroupError(f"rank {rank} cannot reach rank 0's store at {answer}: {error}", (0,)) from error
    return fresh_group(store, rank, world_size, timeout_s, serves=rank == 0)


def _own_address() -> str:
    """An address of this host that others can reach: that of the interface towards a foreign network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; RFC 5737 keeps this address free
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def _mpi_wait(request: Any, deadline: float, rank: int) -> None:
    for pause in pauses():
        if request.Test():
            return
        if time.monotonic() >= deadline:
            raise GroupError(f"rank {rank}: an MPI call of the handshake did not end: does every rank run it?")
        time.sleep(pause)
