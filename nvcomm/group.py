# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other and tell each other things: bounded JSON through a key-value store, never unpickled.

A group does one exchange after the other, in the same order on every rank. Exchange number k of rank r is the key
`prefix/k/r`, so repeated exchanges never mix, whatever their tags; the tag travels with the value, and ranks that are
at different places of the program learn it at once. The last rank to have read exchange k deletes its keys.

Only a `torch.distributed.Store` is needed, not a backend: gloo, NCCL, torchrun's own store or MPI all do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch.distributed as dist

from nvcomm.env import other
from nvcomm.errors import CapabilityError, GroupError, UsageError

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"

MAX_ANSWER_BYTES = 64 << 10
MAX_WORLD_SIZE = 1 << 16  # an answer that claims more is no answer
DEFAULT_TIMEOUT_S = 30.0
# A store is asked again after 0.1 ms, then ever more rarely: ranks mostly arrive together, or seconds apart.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 1e-2


class Group(Protocol):
    """Ranks that can tell each other small things. Every method is collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, tag: str, value: JSON, timeout_s: float) -> list[JSON]:
        """Tells every rank `value` and returns what every rank told, indexed by rank.

        Args:
            tag: what the exchange is about; must be the same on every rank.
            value: at most `MAX_ANSWER_BYTES` as JSON text.
            timeout_s: bound of the wait, from this rank's call.

        Raises:
            UsageError: `value` is not JSON or too large; the other ranks raise GroupError at once.
            GroupError: a rank did not answer (`missing` names it), or is at another tag, or its answer is no JSON.
            CapabilityError: ranks disagree on the world size; the same text on every rank.
        """
        ...

    def barrier(self, tag: str, timeout_s: float) -> None:
        """Returns once every rank is here. Raises as `exchange` does."""
        ...


class StoreGroup:
    """A group over a `torch.distributed.Store`.

    Args:
        store: shared by all ranks; the group keeps it alive, and writes below `prefix` only.
        rank: this rank.
        world_size: number of ranks.
        prefix: names the group in the store; no other group may ever have used it there.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a group of {world_size} ranks: wanted 0 to {world_size - 1}.")
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = prefix
        self._sequence = 0

    def exchange(self, tag: str, value: JSON, timeout_s: float) -> list[JSON]:
        """See `Group.exchange`."""
        deadline = time.monotonic() + timeout_s
        sequence = self._sequence
        self._sequence += 1
        envelope: dict[str, JSON] = {"tag": tag, "world_size": self.world_size}
        try:
            text = _encode(envelope | {"value": value})
        except UsageError as error:
            self._set(sequence, _encode(envelope | {"error": str(error)}))
            raise
        self._set(sequence, text)
        answers = self._collect(sequence, tag, deadline)
        self._forget(sequence)
        return answers

    def barrier(self, tag: str, timeout_s: float) -> None:
        """See `Group.barrier`."""
        self.exchange(tag, None, timeout_s)

    def child_store(self, name: str) -> dist.Store:
        """The group's store for somebody else's keys, apart from the group's own. `name`: never used in it before."""
        return dist.PrefixStore(f"{self._prefix}/{name}", self._store)

    def _key(self, sequence: int, name: object) -> str:
        return f"{self._prefix}/{sequence}/{name}"

    def _set(self, sequence: int, text: str) -> None:
        try:
            self._store.set(self._key(sequence, self.rank), text)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} cannot write to the group's store: {error}") from error

    def _collect(self, sequence: int, tag: str, deadline: float) -> list[JSON]:
        """Reads the envelopes of exchange `sequence` until all ranks, by their own count, have written theirs."""
        seen: dict[int, dict[str, Any]] = {}
        count = self.world_size
        pause = _FIRST_PAUSE_S
        while True:
            for rank in range(count):
                if rank not in seen and (envelope := self._read(sequence, rank)) is not None:
                    seen[rank] = envelope
                    _check_place(envelope, rank, tag, self.rank)
            count = max([count, *(envelope["world_size"] for envelope in seen.values())])
            if len(seen) == count or time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        sizes = {rank: envelope["world_size"] for rank, envelope in sorted(seen.items())}
        if len(set(sizes.values())) > 1:
            raise _other_worlds({rank: sizes.get(rank, "no answer") for rank in range(count)})
        missing = tuple(sorted(set(range(count)) - set(seen)))
        if missing:
            raise GroupError(
                f"rank {self.rank} waited at {tag!r} for rank {', '.join(map(str, missing))} of {count}, in vain: "
                f"find out whether it runs and makes the same calls, or wait longer.",
                missing,
            )
        return [seen[rank]["value"] for rank in range(count)]

    def _read(self, sequence: int, rank: int) -> dict[str, Any] | None:
        key = self._key(sequence, rank)
        try:
            if not self._store.check([key]):
                return None
            data = self._store.get(key)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} cannot read from the group's store: {error}", (rank,)) from error
        return _decode(data, rank)

    def _forget(self, sequence: int) -> None:
        """The last reader deletes the exchange. Every rank has answered by now, so a store that fails here has lost
        the process that served it after the exchange: no harm to it."""
        with contextlib.suppress(RuntimeError):
            if self._store.add(self._key(sequence, "read"), 1) == self.world_size:
                for name in (*range(self.world_size), "read"):
                    self._store.delete_key(self._key(sequence, name))


def local_groups(world_size: int) -> list[StoreGroup]:
    """One group whose ranks are threads of this process; element r is for rank r."""
    store = dist.HashStore()
    return [StoreGroup(store, rank, world_size, "nvcomm/local") for rank in range(world_size)]


def as_group(group: Any) -> Group:
    """`group` itself; of a process group or an mpi4py communicator its ranks.

    Of None torch's default group where there is one, else the ranks of the launcher, see `started_by`.

    Raises:
        UsageError, GroupError: as `from_process_group`, `from_mpi` and `from_environment`.
    """
    if group is None and dist.is_initialized():
        return from_process_group()
    if group is None and started_by() == "mpi":
        from mpi4py import MPI

        return from_mpi(MPI.COMM_WORLD)
    if group is None:
        return from_environment()
    if isinstance(group, dist.ProcessGroup):
        return from_process_group(group)
    if hasattr(group, "Iallgather"):
        return from_mpi(group)
    ranks: Group = group
    return ranks


def started_by() -> Literal["torchrun", "mpi"] | None:
    """What started this process. torchrun counts first: under an mpiexec per host its ranks are the ones meant."""
    if other("RANK") is not None and other("WORLD_SIZE") is not None:
        return "torchrun"
    if any(other(name) is not None for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        return "mpi"
    return None


def from_process_group(process_group: dist.ProcessGroup | None = None) -> StoreGroup:
    """A group of the ranks of a `torch.distributed` process group, through the store that it was built with.

    Args:
        process_group: None is the default group. Every rank builds its groups on it in the same order.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in the group.
    """
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised: call torch.distributed.init_process_group first.")
    wanted = process_group or dist.group.WORLD
    rank = dist.get_rank(wanted)
    if wanted is None or rank < 0:
        raise UsageError("this process is not a rank of the process group: build the communicator on its ranks only.")
    # The one place that needs it: PyTorch has no public name for the store of a process group.
    store = dist.distributed_c10d._get_process_group_store(wanted)
    return StoreGroup(store, rank, dist.get_world_size(wanted), _fresh_prefix(store, rank))


def from_environment(timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreGroup:
    """A group of the processes that torchrun started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: a variable is missing or no number.
        GroupError: the store at MASTER_ADDR cannot be reached within `timeout_s`.
    """
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise UsageError(f"{error}. Start the program with torchrun or mpiexec, or set what torchrun sets.") from error
    except RuntimeError as error:
        raise GroupError(
            f"the store of MASTER_ADDR and MASTER_PORT was not reached: {error}. Find out whether rank 0 runs there."
        ) from error
    return StoreGroup(store, rank, world_size, _fresh_prefix(store, rank))


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
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store = dist.TCPStore(answer["host"], answer["port"], is_master=False, timeout=left)
        except RuntimeError as error:
            raise GroupError(f"rank {rank} cannot reach rank 0's store at {answer}: {error}", (0,)) from error
    return StoreGroup(store, rank, world_size, _fresh_prefix(store, rank))


def _fresh_prefix(store: dist.Store, rank: int) -> str:
    """A prefix that no group has used in `store`: each rank counts its own groups, in the same order everywhere."""
    return f"nvcomm/{store.add(f'nvcomm/groups/{rank}', 1)}"


def _own_address() -> str:
    """An address of this host that others can reach: that of the interface towards a foreign network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; RFC 5737 keeps this address free
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


def _mpi_wait(request: Any, deadline: float, rank: int) -> None:
    pause = _FIRST_PAUSE_S
    while not request.Test():
        if time.monotonic() >= deadline:
            raise GroupError(f"rank {rank}: an MPI call of the handshake did not end: does every rank run it?")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _encode(envelope: dict[str, JSON]) -> str:
    try:
        text = json.dumps(envelope, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"an answer has to be JSON: {error}") from error
    if len(text) > MAX_ANSWER_BYTES:
        raise UsageError(
            f"an answer has {len(text)} bytes; wanted at most {MAX_ANSWER_BYTES}: send tensors by a collective instead."
        )
    return text


def _decode(data: bytes, rank: int) -> dict[str, Any]:
    envelope: Any = None
    if len(data) <= MAX_ANSWER_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            envelope = json.loads(data)
    fields = envelope if isinstance(envelope, dict) else {}
    tag, world_size = fields.get("tag"), fields.get("world_size")
    sound = isinstance(tag, str) and isinstance(world_size, int) and 0 < world_size <= MAX_WORLD_SIZE
    if not sound or not fields.keys() & {"value", "error"}:
        raise GroupError(
            f"rank {rank} answered {data[:64]!r} ({len(data)} bytes), which is none of our envelopes: see whether "
            "another version of nvcomm, or another program, writes to this store."
        )
    return fields


def _check_place(envelope: dict[str, Any], rank: int, tag: str, own_rank: int) -> None:
    if "error" in envelope:
        raise GroupError(f"rank {rank} gave up at {envelope['tag']!r}: {envelope['error']}")
    if envelope["tag"] != tag:
        raise GroupError(
            f"rank {own_rank} is at {tag!r} while rank {rank} is at {envelope['tag']!r}: all ranks make the same calls "
            f"in the same order."
        )


def _other_worlds(told: dict[int, Any]) -> CapabilityError:
    """The error for ranks that were told of different numbers of ranks: rank -> number."""
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in told.items())
    reasons = {rank: [f"world_size={value}"] for rank, value in told.items()}
    return CapabilityError(f"ranks disagree on world_size: {listed}. Start every rank with the same number.", reasons)
