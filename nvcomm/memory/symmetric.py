# SPDX-License-Identifier: Apache-2.0
"""The `peer` world: a process per rank, its mailbox in PyTorch's symmetric memory, mapped by every other rank.

The only user of `torch.distributed._symmetric_memory`, which PyTorch calls alpha. It does the driver's work: physical
memory, handles over Unix sockets or the fabric of an NVLink domain, mappings and, where wanted, a multicast object.

Building is collective, in lockstep: tell facts, allocate, agree on a folder, rendezvous, tell the outcome. After each
step every rank knows whether all of them succeeded; if not, all raise the same error and give back what they have.
PyTorch's rendezvous waits without a deadline, so it runs in a thread that is given one. A rank whose thread does not
return raises GroupError; so do the others. Its process has to end: the thread cannot be stopped.

Process-wide effects, while the rendezvous runs and under a lock: TMPDIR, where PyTorch's sockets lie, and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES where ranks share a GPU. TORCH_SYMM_MEM_DISABLE_MULTICAST=1 stays set for the
rest of the process if a variable switches multicast off (docs/env.md).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch

from nvcomm import topology
from nvcomm.env import multicast_disabled_by
from nvcomm.errors import CapabilityError, GroupError, UsageError
from nvcomm.group import JSON, StoreGroup
from nvcomm.memory.meeting_folder import MeetingFolder, host_id

MAX_REASON_CHARS = 500
_RENDEZVOUS_LOCK = threading.Lock()


class Mapping(Protocol):
    """What a rendezvous returns, as far as it is used here."""

    @property
    def buffer_ptrs(self) -> list[int]: ...

    @property
    def multicast_ptr(self) -> int: ...


class TorchSymmetricMemory:
    """The calls into PyTorch and the driver, one method each, so that tests can make every one of them fail."""

    def device_uuid(self, device: torch.device) -> str:
        """The UUID of `device`, or an error that says why its memory cannot be shared."""
        facts = topology.device(device.index)
        if not facts.virtual_memory:
            raise RuntimeError(f"{device} has no virtual memory management, which mapping a peer's memory needs")
        backend = torch._C._distributed_c10d._SymmetricMemory.get_backend(device)
        if backend != "CUDA":
            raise RuntimeError(
                f"PyTorch's symmetric memory uses the backend {backend}, wanted CUDA: unset TORCH_SYMMMEM"
            )
        return facts.uuid

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that peers can map, uint8: its own allocation, as peers get pointers to the beginning of one."""
        return torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)

    def rendezvous(self, tensor: torch.Tensor, group: StoreGroup, name: str) -> Mapping:
        """Maps every rank's tensor. Collective; returns when all ranks have got that far, which may be never."""
        c10d: Any = torch._C._distributed_c10d
        # PyTorch looks ranks and store up under the name of a process group, and takes no more from it than these.
        process_group = c10d.ProcessGroup(group.child_store(name), group.rank, group.world_size)
        c10d._register_process_group(name, process_group)  # which does not keep it alive
        try:
            with torch.cuda.device(tensor.device):
                mapping: Mapping = c10d._SymmetricMemory.rendezvous(tensor, name)
                return mapping
        finally:
            c10d._unregister_process_group(name)
            del process_group


class SymmetricMemory:
    """One rank's view of all mailboxes; implements `nvcomm.memory.Memory`.

    Closing is local and waits for this rank's device, as PyTorch unmaps. A peer's mapping stays good until that peer
    closes.
    """

    def __init__(
        self,
        group: StoreGroup,
        device: torch.device,
        size_bytes: int,
        *,
        multicast: bool,
        timeout_s: float,
        api: TorchSymmetricMemory | None = None,
    ) -> None:
        """Collective.

        Args:
            group: the ranks; each a process of its own.
            device: this rank's GPU.
            size_bytes: bytes of a mailbox, a multiple of 16, the same on every rank.
            multicast: whether to ask for a multicast object; it comes into being only if every rank asks and can,
                and no environment variable switches it off. `multicast_ptr` says whether it did.
            timeout_s: bound of each of the steps.
            api: stands in for PyTorch and the driver (tests).

        Raises:
            UsageError: an argument is wrong on this rank; the others raise GroupError.
            CapabilityError: a rank cannot take part; the same text on every rank.
            GroupError: a rank did not answer in time. If it was in the rendezvous, its process has to end.
        """
        if device.type != "cuda" or device.index is None:
            raise UsageError(f"device is {device}, wanted a GPU with its index, such as cuda:0.")
        if size_bytes <= 0 or size_bytes % 16:
            raise UsageError(f"size_bytes is {size_bytes}, wanted a positive multiple of 16.")
        self._rank, self._world_size, self._size_bytes = group.rank, group.world_size, size_bytes
        self._tensor: torch.Tensor | None = None
        self._mapping: Mapping | None = None
        self._peer_ptrs: tuple[int, ...] = ()
        self._multicast_ptr = 0
        builder = _Builder(group, device, size_bytes, multicast, timeout_s, api or TorchSymmetricMemory())
        self._tensor, self._mapping, use_multicast = builder.build()
        self._peer_ptrs = tuple(int(ptr) for ptr in self._mapping.buffer_ptrs)
        self._multicast_ptr = int(self._mapping.multicast_ptr) if use_multicast else 0

    @property
    def world(self) -> Literal["peer"]:
        return "peer"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def peer_ptrs(self) -> tuple[int, ...]:
        return self._peer_ptrs

    @property
    def multicast_ptr(self) -> int:
        return self._multicast_ptr

    def local(self) -> torch.Tensor:
        """This rank's mailbox, int32. Raises UsageError once closed."""
        if self._tensor is None:
            raise UsageError("this memory is closed: build a new communicator.")
        return self._tensor.view(torch.int32)

    def close(self) -> None:
        """Unmaps; waits for this rank's device. Harmless when called twice."""
        self._peer_ptrs, self._multicast_ptr = (), 0
        # The mapping first: it refers to the allocation, and a multicast object goes before what is bound to it.
        self._mapping = None
        self._tensor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn("a SymmetricMemory was not closed", ResourceWarning, stacklevel=2)


@dataclass
class _Builder:
    """The steps of building, in lockstep."""

    group: StoreGroup
    device: torch.device
    size_bytes: int
    multicast: bool
    timeout_s: float
    api: TorchSymmetricMemory

    def build(self) -> tuple[torch.Tensor, Mapping, bool]:
        """Memory, its mappings, and whether every rank has a multicast address."""
        disabled_by = multicast_disabled_by()
        if disabled_by is not None:
            # For the rest of the process: PyTorch makes the object inside a rendezvous, ours or another's.
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        wanted = self.multicast and disabled_by is None
        uuid, reason = _attempt(lambda: self.api.device_uuid(self.device))
        facts = self._vote(
            "facts", reason, {"host": host_id(), "uuid": uuid, "multicast": wanted, "size": self.size_bytes}
        )
        sizes = [fact["size"] for fact in facts]
        if len(set(sizes)) > 1:
            raise CapabilityError(
                f"ranks disagree on the size of a mailbox: {sizes} bytes by rank. Give all of them the same max_bytes."
            )
        shared_gpu = len({fact["uuid"] for fact in facts}) < len(facts)
        wanted = all(fact["multicast"] for fact in facts) and not shared_gpu
        tensor, reason = _attempt(lambda: self.api.allocate(self.size_bytes, self.device))
        with self._meeting_folder([fact["host"] for fact in facts], reason) as (folder, token):
            overlapping = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if shared_gpu else {}
            no_multicast = {} if wanted else {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
            with _RENDEZVOUS_LOCK, _variables({"TMPDIR": str(folder), **overlapping, **no_multicast}):
                outcome = self._rendezvous(tensor, f"nvcomm/{token}")
            return self._conclude(tensor, outcome, wanted)

    @contextlib.contextmanager
    def _meeting_folder(self, hosts: list[str], reason: str | None) -> Iterator[tuple[Path, str]]:
        """A folder that the ranks of this host share, and a token that names this rendezvous for all ranks."""
        first = hosts.index(hosts[self.group.rank])
        folder = MeetingFolder()
        try:
            if first == self.group.rank and reason is None:
                _, reason = _attempt(folder.create)
            told: dict[str, JSON] = {"path": str(folder.path), "token": secrets.token_hex(8)}
            places = self._vote("allocate", reason, told)
            if first != self.group.rank:
                _, reason = _attempt(lambda: folder.join(Path(places[first]["path"])))
            self._vote("folder", reason, {})
            yield folder.path, str(places[0]["token"])
        finally:
            folder.remove()

    def _rendezvous(self, tensor: torch.Tensor, name: str) -> tuple[str, Mapping | str | None]:
        """("ok", mapping), ("failed", why) or ("late", None): past the deadline, its thread still in there."""
        results: list[tuple[Mapping | None, str | None]] = []
        thread = threading.Thread(
            target=lambda: results.append(_attempt(lambda: self.api.rendezvous(tensor, self.group, name))),
            name="nvcomm-rendezvous",
            daemon=True,  # it may never return, and must not keep the process
        )
        thread.start()
        thread.join(self.timeout_s)
        if not results:
            return "late", None
        mapping, reason = results[0]
        if reason is None:
            reason = self._doubt(mapping, tensor)
        return ("ok", mapping) if reason is None else ("failed", reason)

    def _doubt(self, mapping: Any, tensor: torch.Tensor) -> str | None:
        """Why the mapping cannot be used, or None."""
        ptrs = list(mapping.buffer_ptrs)
        if len(ptrs) != self.group.world_size or not all(ptrs):
            return f"the rendezvous mapped {sum(map(bool, ptrs))} of {self.group.world_size} ranks"
        if ptrs[self.group.rank] != tensor.data_ptr():
            return "the rendezvous gave a pointer to this rank's memory that is not its beginning"
        if any(ptr % 16 for ptr in ptrs):
            return "the rendezvous gave a pointer that is not a multiple of 16"
        return None

    def _conclude(
        self, tensor: torch.Tensor, outcome: tuple[str, Any], wanted: bool
    ) -> tuple[torch.Tensor, Mapping, bool]:
        """Tells the outcome. Others may wait up to their deadline first, so this waits for twice the time."""
        state, result = outcome
        told: dict[str, JSON] = {
            "state": state,
            "reason": result if state == "failed" else None,
            "multicast": state == "ok" and wanted and int(result.multicast_ptr) != 0,
        }
        answers: list[Any] = self.group.exchange("nvcomm.symmetric.outcome", told, 2 * self.timeout_s)
        late = tuple(rank for rank, answer in enumerate(answers) if answer["state"] == "late")
        failed = {rank: [str(answer["reason"])] for rank, answer in enumerate(answers) if answer["state"] == "failed"}
        if late:
            why = f" Ranks that failed: {_listed(failed)}." if failed else ""
            raise GroupError(
                f"the exchange of memory handles did not end within {self.timeout_s:g} s on rank "
                f"{', '.join(map(str, late))}.{why} Those processes have to end: PyTorch waits there for ever.",
                late,
            )
        if failed:
            raise CapabilityError(
                f"ranks cannot map each other's memory: {_listed(failed)}. `nvcomm doctor` tells what GPUs can map.",
                failed,
            )
        return tensor, result, all(answer["multicast"] for answer in answers)

    def _vote(self, step: str, reason: str | None, value: dict[str, JSON]) -> list[dict[str, Any]]:
        """Tells every rank `value`; raises the same CapabilityError on all of them if any has a reason not to go on."""
        answers: list[Any] = self.group.exchange(
            f"nvcomm.symmetric.{step}", value if reason is None else {"reason": reason}, self.timeout_s
        )
        reasons = {rank: [str(answer["reason"])] for rank, answer in enumerate(answers) if "reason" in answer}
        if reasons:
            raise CapabilityError(f"symmetric memory cannot be set up ({step}): {_listed(reasons)}.", reasons)
        return answers


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, why not). Any error: what it was is told to all ranks, which then raise together."""
    try:
        return call(), None
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return None, f"{type(error).__name__}: {first_line}"[:MAX_REASON_CHARS]


def _listed(reasons: dict[int, list[str]]) -> str:
    return "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in sorted(reasons.items()))


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, and puts back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
