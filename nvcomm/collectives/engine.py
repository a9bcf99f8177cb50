# SPDX-License-Identifier: Apache-2.0
"""One rank's collectives on a GPU: its state block, its compiled kernels, and what the device recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvcomm import jit, mailbox
from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
from nvcomm.collectives.all_reduce import ReduceOp, ReduceProtocol, Reductions
from nvcomm.collectives.all_reduce_mhc_config import MhcPart, MhcShape
from nvcomm.collectives.all_reduce_mhc_launch import MhcLauncher
from nvcomm.collectives.delivery import Delivery
from nvcomm.collectives.fault_report import RESET_FAILED, fault_error, kind_of
from nvcomm.collectives.late_copy import LateCopyKernel, stash_bytes
from nvcomm.collectives.mailbox_kernel import load
from nvcomm.collectives.marker import Marker
from nvcomm.collectives.tensors import ACCESS_BYTES, access_bytes
from nvcomm.env import settings
from nvcomm.errors import NvcommError, UnsupportedError, UsageError
from nvcomm.group import Group
from nvcomm.handle import Handle
from nvcomm.host.faults import Fault
from nvcomm.host.recovery import above
from nvcomm.mailbox import MailboxLayout
from nvcomm.memory.virtual import VirtualMemory
from nvcomm.options import Options
from nvcomm.stats import Audit, Stats
from nvcomm.streams import CallOrder

if TYPE_CHECKING:
    from nvcomm.memory.symmetric import SymmetricMemory

THREADS = 256
_LAST_SITE = 2**32 - 2


class DeviceEngine:
    """A rank's mailbox on a GPU and the kernels that work on it.

    Not for several threads at once. Nothing here allocates or synchronises between `__init__` and `reset()`, so a
    call can be captured (R9).
    """

    def __init__(
        self,
        memory: VirtualMemory | SymmetricMemory,
        layout: MailboxLayout,
        device: torch.device,
        options: Options,
        *,
        max_ctas: int,
        ranks_on_device: int,
        group: Group | None = None,
    ) -> None:
        """Arms the mailbox and loads every kernel. Peers may publish only once all ranks have done so.

        Args:
            memory: the mailboxes; the engine closes them with itself.
            layout: what lies where in them.
            device: this rank's GPU.
            options: see there.
            max_ctas: most CTAs of a launch (docs/mailbox.md R8).
            ranks_on_device: ranks of the communicator on the most crowded device, as on every rank.
            group: the ranks, for `reset`; None where one process drives them all.
        """
        self.memory = memory
        self.layout = layout
        self.device = device
        self.options = options
        self.max_ctas = max_ctas
        self._alone = ranks_on_device == 1
        self.multicast = memory.multicast_ptr != 0
        self.rank, self.world_size = memory.rank, memory.world_size
        self._group = group
        self._releases: list[Callable[[], object]] = []
        self._checks = settings().device_checks > 0
        self._delayed = options.transport == "delayed"
        self.tag = 0  # the caller's own mark of the calls that follow, compared with device checks (R11)
        self._site = 0
        self._total_calls = self._last_generation = self._total_escapes = self._last_escapes = 0
        self._order = CallOrder(device)
        self._state = torch.zeros(mailbox.STATE_WORDS, dtype=torch.int32, device=device)
        self._fault = torch.zeros(mailbox.FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        self._fault_words = self._fault.numpy().view(np.uint32)
        self._delivery = Delivery(device, options.seed * self.world_size + self.rank) if self._delayed else None
        self._stash: torch.Tensor | None = None
        if options.protocol == "late-copy" and not self._delayed:
            self._stash = torch.zeros(stash_bytes(layout), dtype=torch.uint8, device=device)
        outbox = self._delivery.ptr if self._delivery else self._stash.data_ptr() if self._stash is not None else 0
        self._state[mailbox.STATE_OUTBOX : mailbox.STATE_OUTBOX + 2].view(torch.int64).fill_(outbox)
        # the next rank's mailbox follows the own one, so that the ranks' stores spread over the destinations
        peers = [memory.peer_ptrs[(self.rank + i) % self.world_size] for i in range(self.world_size)]
        self._handle = Handle(
            peers, memory.multicast_ptr, self._state.data_ptr(), self._fault.data_ptr(), int(options.timeout_s * 1e9),
            self.rank,
        )  # fmt: skip
        self._packed = jit.pack(self._handle)
        try:
            self._kernels = {width: self._compile(width) for width in ACCESS_BYTES}
            self._reductions = Reductions(
                layout, options, places=self._places, multicast=self.multicast, launcher=self._launch
            )
            self._marker: Marker | None = None
            if self.multicast:
                self._marker = Marker(memory, layout, self._state.data_ptr(), max_ctas=max_ctas, threads=THREADS)
            self.arm(options.generation)
        except BaseException:
            if self._delivery is not None:
                self._delivery.close()
            raise

    def _compile(self, width: int) -> jit.CompiledKernel:
        config = AllGatherConfig(
            self.layout, width, self.multicast, self.options.pdl, THREADS, self._checks, self._delayed
        )
        kernel_type = LateCopyKernel if self.options.protocol == "late-copy" else AllGatherKernel
        kernel = load(kernel_type(config))
        resident = jit.resident_ctas_per_sm(kernel)
        if resident < config.ctas_per_sm:  # R8 counts on it
            raise UnsupportedError(
                f"this GPU holds {resident} CTAs of the all-gather on a multiprocessor; wanted {config.ctas_per_sm}. "
                "Is part of it reserved, by MPS or a debugger?"
            )
        return kernel

    def arm(self, generation: int) -> None:
        """Empties the own mailbox and sets the state to slot 0 and `generation`; waits for the device."""
        words = self.memory.local()
        words[: self.layout.faults_base // 4].fill_(_signed(mailbox.EMPTY))
        words[self.layout.faults_base // 4 :].zero_()
        self._calls(self.state())
        self._last_generation = generation
        self._state[: mailbox.STATE_ESCAPES].zero_()
        self._state[mailbox.STATE_ENDED] = 0  # calls that overlapped counted each other's CTAs
        self._state[mailbox.STATE_GENERATION] = _signed(generation)
        self._fault_words[:] = 0
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """See `Communicator.reset` (docs/mailbox.md R10b)."""
        if self._group is None:
            raise UsageError("this rank is one of several in this process: call reset() of the virtual world.")
        timeout_s = 2 * self.options.timeout_s  # another rank may still wait its own timeout out
        try:
            torch.cuda.synchronize(self.device)  # drain: own grids ended, and with them their stores, multicast apart
            if self._marker is not None:
                self._marker.blank()
            generations = self._group.exchange("nvcomm.reset.drained", self.generation(), timeout_s)
            if self._marker is not None:
                self._marker.publish()
                self._marker.wait(timeout_s)
            self.arm(above(generations))
            self._group.barrier("nvcomm.reset.armed", timeout_s)
        except BaseException:
            self.break_down()
            raise

    def break_down(self) -> None:
        """A reset ended half way: nobody may take what is in the mailboxes for words of a call."""
        if self._fault_words[0] == 0:
            self._fault_words[1] = self.rank
            self._fault_words[0] = RESET_FAILED
        with suppress(RuntimeError):  # of a context that is lost: the first error is the one to see
            self._state[mailbox.STATE_BROKEN] = RESET_FAILED

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launches one all-gather of checked tensors on the current stream; see `Communicator.all_gather`."""
        num_bytes = x.nbytes
        inp, result = x.data_ptr(), out.data_ptr()
        width = access_bytes(inp, result, num_bytes)
        ctas = min(self.max_ctas, math.ceil(mailbox.num_chunks(num_bytes) / THREADS))
        self._launch("all_gather", x.dtype, self._kernels[width], (inp, result, num_bytes), ctas)

    def _launch(
        self, operation: str, dtype: torch.dtype, kernel: jit.CompiledKernel, work: tuple[Any, ...], clusters: int
    ) -> None:
        """Launches `kernel` on the current stream, in order (R7); see `Launcher`."""
        if torch.cuda.current_device() != self.device.index:  # CUDA launches on the current device alone
            with torch.cuda.device(self.device):
                self._launch(operation, dtype, kernel, work, clusters)
            return
        if self._delivery is not None and not self._delivery.active:
            with self._delivery.serving():
                self._launch(operation, dtype, kernel, work, clusters)
            return
        stream, eager = self._order.enter()
        self._site = self._site % _LAST_SITE + 1
        kernel(work, self._packed, (self._site, kind_of(operation, dtype), self.tag), clusters, stream)
        if eager:
            self._order.leave(stream)

    def serving(self) -> AbstractContextManager[None]:
        """See `Communicator.serving`."""
        return self._delivery.serving() if self._delivery else nullcontext()

    def ready(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """See `Communicator.prepare`."""
        return self._reductions.ready(op, dtype)

    def prepare(self, op: ReduceOp, dtype: torch.dtype) -> None:
        """See `Communicator.prepare`."""
        with torch.cuda.device(self.device):
            self._reductions.prepare(op, dtype)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, protocol: ReduceProtocol) -> None:
        """Launches one all-reduce of checked tensors on the current stream; see `Communicator.all_reduce`."""
        self._reductions.all_reduce(x, out, protocol)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launches one reduce-scatter of checked tensors on the current stream."""
        self._reductions.reduce_scatter(x, out)

    def mhc(self, shape: MhcShape, parts: tuple[MhcPart, ...]) -> MhcLauncher:
        """Compiles and loads the kernels of a sublayer boundary; see `Communicator.mhc`."""
        shape.check_parts(parts)
        with torch.cuda.device(self.device):
            return MhcLauncher(
                shape, parts, self.layout, self.options, self._handle, places=self._places, alone=self._alone,
                multicast=self.multicast, launcher=self._launch,
            )  # fmt: skip

    def _places(self, ctas_per_sm: int) -> int:
        """CTAs of a launch (R8) of a kernel of which so many fit one multiprocessor."""
        return self.max_ctas * ctas_per_sm // AllGatherConfig(self.layout).ctas_per_sm

    def fault(self) -> NvcommError | None:
        """What the device recorded, if it did. Waits only after a fault, for a copy of the fault rows."""
        own = Fault.load(self._fault_words)
        return None if own is None else fault_error(own, self.layout, self.memory.local(), self.options.timeout_s)

    def generation(self) -> int:
        """The next call's generation; waits for the device."""
        return int(self.state()[mailbox.STATE_GENERATION])

    def _calls(self, state: np.ndarray) -> int:
        """Collectives since construction: the generation steps with each, and jumps at a reset.

        The device counts in 32 bits. Carried on here, so right where somebody looks once in 2**32 calls (half a day).
        """
        generation = int(state[mailbox.STATE_GENERATION])
        self._total_calls += (generation - self._last_generation) & mailbox.GENERATION_MASK
        self._last_generation = generation
        return self._total_calls

    def _escapes(self, state: np.ndarray) -> int:
        """Chunks with a reserved word since construction, carried on in the same way."""
        escapes = int(state[mailbox.STATE_ESCAPES])
        self._total_escapes += (escapes - self._last_escapes) & 0xFFFFFFFF
        self._last_escapes = escapes
        return self._total_escapes

    def state(self) -> np.ndarray:
        """The state block as uint32; waits for the device: calls may be under way on any stream."""
        torch.cuda.synchronize(self.device)
        return self._state.cpu().numpy().view(np.uint32)

    def stats(self) -> Stats:
        """Counts since construction; waits for the device."""
        state = self.state()
        waits = state[mailbox.STATE_WAITS : mailbox.STATE_WAITS + self.world_size]
        return Stats(
            calls=self._calls(state),
            bytes=int(state[mailbox.STATE_BYTES : mailbox.STATE_BYTES + 2].view(np.uint64)[0]),
            escapes=self._escapes(state),
            longest_wait_us=tuple(int(wait) for wait in waits),
        )

    def audit(self) -> Audit:
        """Reads the own mailbox back; waits for the device. Between calls every word of it is EMPTY (R3)."""
        state = self.state()
        words = self.memory.local()[: self.layout.faults_base // 4]
        dirty = int((words != _signed(mailbox.EMPTY)).sum().item())
        return Audit(int(state[mailbox.STATE_SLOT]), int(state[mailbox.STATE_GENERATION]), dirty)

    def on_close(self, release: Callable[[], object]) -> None:
        """Has `release` called once this engine is closed."""
        self._releases.append(release)

    def close(self) -> None:
        """Lets go of mailbox and state; waits for the device, so that no kernel uses them any more."""
        torch.cuda.synchronize(self.device)
        self._kernels = {}
        if self._delivery is not None:
            self._delivery.close()
        self.memory.close()
        for release in self._releases:
            release()


def _signed(word: int) -> int:
    """A 32-bit word as torch's int32 has it."""
    return word - 2**32 if word >= 2**31 else word
