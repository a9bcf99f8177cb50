# SPDX-License-Identifier: Apache-2.0
"""`HostEngine`: the collectives of one CPU rank, and what keeps them honest: check, reset, audit."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch

from nvcomm.errors import NvcommError, UsageError
from nvcomm.group import Group
from nvcomm.host import headers
from nvcomm.host.mutations import MUTATIONS, all_gather_type
from nvcomm.host.port import Counts, Port
from nvcomm.host.recovery import audit, reset
from nvcomm.host.transport import DelayedTransport, DirectTransport
from nvcomm.host.views import MailboxViews
from nvcomm.host.words import Bytes, require_x86_64
from nvcomm.mailbox import GENERATION_MASK, STATE_BROKEN, STATE_BUSY, STATE_GENERATION, MailboxLayout
from nvcomm.memory.host import HostMemory
from nvcomm.stats import Audit, Stats

FILL = 0xFF


class HostEngine:
    """One rank's collectives over shared memory. Calls block until this rank's result is complete.

    The constructor waits for nobody, as a mailbox is armed before any other rank has it.

    Attributes:
        memory: the mailboxes.
        rank: this rank.
        world_size: number of ranks.

    Args:
        memory: armed with EMPTY up to `layout.faults_base`.
        layout: the same on every rank.
        group: the same ranks; used by `reset` alone.
        timeout_s: bound of a call's waits, from its first failed poll.
        generation: the generation to begin with, the same on every rank.
        device_checks: 1: ranks compare their calls (docs/mailbox.md R11).
        mutations: rules to switch off; for tests alone.
        transport: "direct", or "delayed" for tests and stress.
        seed: of the delayed transport; ranks may share it.
        owns_memory: whether `close()` closes `memory` too.

    Raises:
        UsageError: the arguments do not fit each other.
        UnsupportedError: the processor is not x86-64.
    """

    def __init__(
        self,
        memory: HostMemory,
        layout: MailboxLayout,
        group: Group,
        *,
        timeout_s: float,
        generation: int = 0,
        device_checks: int = 0,
        mutations: frozenset[str] = frozenset(),
        transport: Literal["direct", "delayed"] = "direct",
        seed: int = 0,
        owns_memory: bool = False,
    ) -> None:
        require_x86_64()
        _check_fit(memory, layout, group)
        if not mutations <= MUTATIONS:
            raise UsageError(f"unknown mutations {sorted(mutations - MUTATIONS)}; known are {sorted(MUTATIONS)}.")
        if transport not in {"direct", "delayed"}:
            raise UsageError(f"unknown transport {transport!r}; the host world has 'direct' and 'delayed'.")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s is {timeout_s}; wanted seconds above 0.")
        self.rank = memory.rank
        self.world_size = memory.world_size
        self.memory = memory
        self._owns_memory = owns_memory
        self._device_checks = device_checks
        self._group = group
        self._pid = os.getpid()
        self._mutations = mutations
        self._busy = threading.Lock()
        self._closed = False
        self._error: NvcommError | None = None
        carrier = DelayedTransport(seed * self.world_size + self.rank) if transport == "delayed" else DirectTransport()
        mailboxes = tuple(MailboxViews(words, layout) for words in memory.words)
        counts = Counts([0] * self.world_size)
        self._port = Port(self.rank, layout, mailboxes, carrier, timeout_s, counts)
        self._port.state[STATE_GENERATION] = generation & GENERATION_MASK
        self._all_gather = all_gather_type(mutations)(self._port, device_checks)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, *, tag: int = 0) -> None:
        """Gathers `x` of every rank into `out`, bit by bit. Collective; blocks.

        Args:
            x: any shape and dtype, contiguous, on the CPU, at most `max_bytes`, the same size on every rank.
            out: world_size times as many bytes, contiguous, on the CPU; overwritten.
            tag: a mark of the caller's own, compared with `device_checks` (R11).

        Raises:
            UsageError: the arguments do not fit, another thread is inside this engine (R7), it is closed, or this
                process was forked off the one that built it. Nothing was sent.
            PeerTimeoutError: a rank did not publish within `timeout_s` (R10). What it did not send is 0xFF bytes.
            CollectiveMismatchError: ranks make different calls (R11); `out` is 0xFF bytes.
        """
        self._enter()
        try:
            payload, result = self._bytes_of(x, out, tag)
            if error := self.fault():
                result[...] = FILL
                raise error
            call = headers.Call("all_gather", str(x.dtype).removeprefix("torch."), len(payload), self.generation, tag)
            self._run(payload, result, call)
        finally:
            self._leave()

    @property
    def generation(self) -> int:
        """The generation of the next call."""
        return self._port.generation

    @property
    def slot(self) -> int:
        """The slot of the next call."""
        return self._port.slot

    def fault(self) -> NvcommError | None:
        """What broke this rank, if anything did: a fresh error at every call."""
        error = self._error
        if error is None:
            return None
        copy = type(error).__new__(type(error), *error.args)
        copy.__dict__.update(error.__dict__)
        copy.args = error.args
        return copy

    def check(self) -> None:
        """Raises what broke this rank, if anything did."""
        self._usable()
        if error := self.fault():
            raise error

    def stats(self) -> Stats:
        """The counts since this engine was built."""
        return self._port.counts.freeze()

    def audit(self) -> Audit:
        """Reads this rank's mailbox back, between calls of all ranks: anything but 0 dirty words is a bug.

        Raises:
            UsageError: another thread is inside, or the engine is closed.
        """
        self._enter()
        try:
            return audit(self._port, self._port.timeout_s)
        finally:
            self._leave()

    def reset(self, timeout_s: float | None = None) -> None:
        """Brings all ranks back to an empty mailbox and one generation (docs/mailbox.md R10b). Collective.

        Args:
            timeout_s: bound of each of its two waits; by default twice the engine's, as another rank may still be
                inside a call that has not timed out yet.

        Raises:
            GroupError: a rank did not come; the engine is broken, survivors build a new one on a new group.
            UsageError: another thread is inside, or the engine is closed.
        """
        self._enter()
        try:
            bound = 2 * self._port.timeout_s if timeout_s is None else timeout_s
            reset(self._port, self._group, bound, rearm="R10b" not in self._mutations)
        except NvcommError as error:
            self._error = self._error or error
            raise
        else:
            self._error = None
            self._all_gather = type(self._all_gather)(self._port, self._device_checks)
        finally:
            self._leave()

    def close(self) -> None:
        """Ends the engine; what it has published still lands. Local, and harmless when called twice."""
        if self._closed or os.getpid() != self._pid:
            return
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread is inside this engine: join it before close().")
        self._closed = True
        self._port.transport.close()
        # Views would keep the mapping alive beyond the memory's own close().
        self._port.mailboxes = ()
        if self._owns_memory:
            self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, payload: Bytes, result: Bytes, call: headers.Call) -> None:
        try:
            self._all_gather.run(payload, result, call)
        except NvcommError as error:
            self._error = error
            raise
        except BaseException as error:
            # Somewhere between publish and clear: the mailboxes are no longer what the next call expects.
            self._port.state[STATE_BROKEN] = 1
            self._error = NvcommError(
                f"rank {self.rank}: {type(error).__name__} ended generation {call.generation} half-way. Call reset() "
                f"on every rank, or build a new communicator."
            )
            raise

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this engine belongs to process {self._pid}, this is process {os.getpid()}, forked off it: build a "
                f"new communicator here, or start processes with spawn."
            )
        if self._closed:
            raise UsageError("this engine is closed: build a new communicator.")

    def _enter(self) -> None:
        """Takes the busy word: one mailbox, one order (R7)."""
        self._usable()
        if not self._busy.acquire(blocking=False) and "R7" not in self._mutations:
            raise UsageError(
                f"rank {self.rank}: another thread is inside a call on this mailbox. Make one call after the other, "
                f"or build one communicator per thread."
            )
        self._port.state[STATE_BUSY] = 1

    def _leave(self) -> None:
        self._port.state[STATE_BUSY] = 0
        if self._busy.locked():
            self._busy.release()

    def _bytes_of(self, x: torch.Tensor, out: torch.Tensor, tag: int) -> tuple[Bytes, Bytes]:
        num_bytes = x.nbytes
        if num_bytes > self._port.layout.max_bytes:
            raise UsageError(f"x has {num_bytes} bytes; this communicator was built for {self._port.layout.max_bytes}.")
        if out.nbytes != num_bytes * self.world_size:
            raise UsageError(f"out has {out.nbytes} bytes; wanted {self.world_size} x {num_bytes}.")
        if not 0 <= tag <= headers.MAX_TAG:
            raise UsageError(f"tag is {tag}; wanted 0 to {headers.MAX_TAG}.")
        result = _as_bytes(out, "out").reshape(self.world_size, num_bytes)
        return _as_bytes(x, "x"), result


def _as_bytes(tensor: torch.Tensor, name: str) -> Bytes:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise UsageError(f"{name} is a {tensor.layout} tensor on {tensor.device}; wanted a contiguous one on the CPU.")
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"{name} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() first.")
    array: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert array.dtype == np.uint8
    return array


def _check_fit(memory: HostMemory, layout: MailboxLayout, group: Group) -> None:
    seen = {(memory.rank, memory.world_size), (group.rank, group.world_size), (memory.rank, layout.world_size)}
    if len(seen) > 1:
        raise UsageError(f"memory, group and layout are not of one rank and world size: {sorted(seen)}.")
    if memory.size_bytes < layout.size_bytes:
        raise UsageError(f"the memory has {memory.size_bytes} bytes, the layout needs {layout.size_bytes}.")
