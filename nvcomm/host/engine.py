# SPDX-License-Identifier: Apache-2.0
"""`HostEngine`: the collectives of one CPU rank, and what keeps them honest: check, reset, audit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, Self

import torch

from nvcomm.arguments import check_reduction
from nvcomm.errors import NvcommError, UsageError
from nvcomm.group import Group
from nvcomm.host import headers
from nvcomm.host.all_gather import all_gather
from nvcomm.host.all_reduce import all_reduce, choose
from nvcomm.host.all_reduce_mhc import HostBoundary
from nvcomm.host.mutations import MUTATIONS, steps_type
from nvcomm.host.port import Counts, Port
from nvcomm.host.recovery import audit, reset
from nvcomm.host.reduce import check_dtype, part
from nvcomm.host.reduce_scatter import reduce_scatter
from nvcomm.host.steps import FILL
from nvcomm.host.tensors import input_bytes, output_bytes
from nvcomm.host.transport import DelayedTransport, DirectTransport
from nvcomm.host.views import MailboxViews
from nvcomm.host.words import Bytes, require_x86_64
from nvcomm.mailbox import GENERATION_MASK, STATE_BROKEN, STATE_BUSY, STATE_GENERATION, MailboxLayout
from nvcomm.memory.host import HostMemory
from nvcomm.stats import Audit, Stats

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce_mhc_config import MhcShape


class HostEngine:
    """One rank's collectives over shared memory. Calls block until this rank's result is complete.

    The constructor waits for nobody, as a mailbox is armed before any other rank has it.

    Attributes:
        memory: the mailboxes.
        rank: this rank.
        world_size: number of ranks.
        tag: the caller's own mark of the calls that follow, 0 to 65535; compared with `device_checks` (R11).

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
        self.tag = 0
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
        self._steps = steps_type(mutations)(self._port, device_checks)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Gathers `x` of every rank into `out`, bit by bit. Collective; blocks.

        Args:
            x: any shape and dtype, contiguous, on the CPU, at most `max_bytes`, the same size on every rank.
            out: world_size times as many bytes, contiguous, on the CPU; overwritten.

        Raises:
            UsageError: the arguments do not fit, another thread is inside this engine (R7), it is closed, or this
                process was forked off the one that built it. Nothing was sent.
            PeerTimeoutError: a rank did not publish within `timeout_s` (R10). What it did not send is 0xFF bytes.
            CollectiveMismatchError: ranks make different calls (R11); `out` is 0xFF bytes.
        """
        payload, result = self._input(x), output_bytes(out, x.nbytes * self.world_size)
        rows = result.reshape(self.world_size, len(payload))
        self._run("all_gather", x, result, lambda call: all_gather(self._steps, payload, rows, call))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, protocol: str = "auto") -> None:
        """Sums `x` of every rank into `out`, in FP32 and one fixed order (R13). Collective; blocks.

        Args:
            x: bf16, fp16 or fp32, contiguous, on the CPU, at most `max_bytes`, the same shape on every rank.
            out: as `x`; overwritten.
            protocol: "ll", "two_shot" or "auto", the same on every rank; all give the same bits.

        Raises:
            UsageError, PeerTimeoutError, CollectiveMismatchError: as `all_gather`; `out` is 0xFF bytes after the
                latter two.
        """
        check_dtype("all_reduce", x, out)
        payload, result = self._input(x), output_bytes(out, x.nbytes)
        chosen = choose(protocol, len(payload), self.world_size)

        def body(call: headers.Call) -> None:
            all_reduce(self._steps, payload, result, call, x.dtype, chosen)

        self._run(f"all_reduce {chosen}", x, result, body)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sums this rank's rows of every rank's `x` into `out`, with the bits of `all_reduce`. Collective; blocks.

        Args:
            x: (rows, *rest), otherwise as in `all_reduce`.
            out: (own rows, *rest); overwritten. The first `rows % world_size` ranks own one row more.

        Raises:
            UsageError, PeerTimeoutError, CollectiveMismatchError: as `all_reduce`.
        """
        check_dtype("reduce_scatter", x, out)
        if x.dim() == 0:
            raise UsageError("reduce_scatter: got a scalar; wanted rows to split.")
        num_rows = x.shape[0]
        start, stop = part(num_rows, self.rank, self.world_size)
        own_bytes = x.nbytes // num_rows * (stop - start) if num_rows else 0
        payload, result = self._input(x), output_bytes(out, own_bytes)

        def body(call: headers.Call) -> None:
            reduce_scatter(self._steps, payload, result, call, x.dtype, num_rows)

        self._run("reduce_scatter", x, result, body)

    def ready(self, op: str, dtype: torch.dtype) -> bool:
        """Whether `op` can run on `dtype` without loading anything: always, there is nothing to load."""
        check_reduction(op, dtype)
        return True

    def prepare(self, op: str, dtype: torch.dtype) -> None:
        """Nothing to compile or load; raises UsageError where a GPU's engine does."""
        check_reduction(op, dtype)

    def mhc(self, shape: MhcShape, parts: tuple[str, ...]) -> HostBoundary:
        """The sublayer boundary; see `Communicator.mhc`. There is nothing to compile, so any shape and all parts do."""
        shape.check_parts(parts)
        return HostBoundary(self._run, lambda: self._steps)

    @property
    def generation(self) -> int:
        """The generation of the next call."""
        return self._port.generation

    @property
    def slot(self) -> int:
        """The slot of the next call."""
        return self._port.slot

    def serving(self) -> AbstractContextManager[None]:
        """Nothing to do: on the CPU the delayed transport's threads deliver at any time."""
        return nullcontext()

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
        except BaseException as error:  # half way: nobody may take what is in the mailboxes for words of a call
            half_way = f"rank {self.rank}: {type(error).__name__} ended reset() half-way. Build a new communicator."
            self._error = self._error or (error if isinstance(error, NvcommError) else NvcommError(half_way))
            raise
        else:
            self._error = None
            self._steps = type(self._steps)(self._port, self._device_checks)
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

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, operation: str, x: torch.Tensor, result: Bytes, body: Callable[[headers.Call], None]) -> None:
        """One call: nothing if the rank is broken, and broken for good if it ends half-way."""
        self._enter()
        try:
            if error := self.fault():
                result[...] = FILL
                raise error
            dtype = str(x.dtype).removeprefix("torch.")
            call = headers.Call(operation, dtype, x.nbytes, self.generation, self.tag)
            try:
                body(call)
            except NvcommError as error:
                self._error = error
                raise
            except BaseException as error:
                # Somewhere between publish and clear: the mailboxes are no longer what the next call expects.
                self._port.state[STATE_BROKEN] = 1
                self._error = NvcommError(
                    f"rank {self.rank}: {type(error).__name__} ended generation {call.generation} half-way. Call "
                    f"reset() on every rank, or build a new communicator."
                )
                raise
        finally:
            self._leave()

    def _input(self, x: torch.Tensor) -> Bytes:
        return input_bytes(x, self._port.layout.max_bytes)

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


def _check_fit(memory: HostMemory, layout: MailboxLayout, group: Group) -> None:
    seen = {(memory.rank, memory.world_size), (group.rank, group.world_size), (memory.rank, layout.world_size)}
    if len(seen) > 1:
        raise UsageError(f"memory, group and layout are not of one rank and world size: {sorted(seen)}.")
    if memory.size_bytes < layout.size_bytes:
        raise UsageError(f"the memory has {memory.size_bytes} bytes, the layout needs {layout.size_bytes}.")
