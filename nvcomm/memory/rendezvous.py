# SPDX-License-Identifier: Apache-2.0
"""Every rank's memory mapped by every other: the steps of building symmetric memory, in lockstep.

Building is collective: tell facts, allocate, agree on a folder, rendezvous, tell the outcome. After each step every
rank knows whether all of them succeeded; if not, all raise the same error and give back what they have. PyTorch's
rendezvous waits without a deadline, so it runs in a thread that is given one. A rank whose thread does not return
raises GroupError; so do the others. Its process has to end: the thread cannot be stopped.

Process-wide effects, while the rendezvous runs and under a lock: TMPDIR, where PyTorch's sockets lie, and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES where ranks share a GPU. TORCH_SYMM_MEM_DISABLE_MULTICAST=1 stays set for the
rest of the process if a variable switches multicast off (docs/env.md).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvcomm.bounded_call import BoundedCall
from nvcomm.env import multicast_disabled_by
from nvcomm.errors import CapabilityError, GroupError
from nvcomm.group import JSON, StoreGroup
from nvcomm.memory.meeting_folder import MeetingFolder, host_id
from nvcomm.memory.torch_symmetric import Mapping, TorchSymmetricMemory

MAX_REASON_CHARS = 500
_RENDEZVOUS_LOCK = threading.Lock()


@dataclass
class Rendezvous:
    """One rank's part in the steps; arguments as of `nvcomm.memory.symmetric.SymmetricMemory`."""

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
        call = BoundedCall(
            lambda: _attempt(lambda: self.api.rendezvous(tensor, self.group, name)), name="nvcomm-rendezvous"
        )
        if not call.ended(self.timeout_s):
            return "late", None
        mapping, reason = call.result()
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
