# SPDX-License-Identifier: Apache-2.0
"""The markers of `reset()`: EMPTY, published over every word of the own rows (docs/mailbox.md R10b).

A multicast copy may outlive the grid that sent it, so a rank cannot promise that its stores have landed. A marker that
follows them on the same way can: who stored something else over his whole mailbox and then reads EMPTY in a word knows
that every older store to it has landed (A2), for no call ever publishes EMPTY (R5). And the word is armed already.

Every word goes through the address that calls publish it with, and by the thread of the grid that does so in an
all-gather: chunk c by thread c modulo the size of the largest grid, records and headers by the lanes that publish them.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm import device, jit, mailbox
from nvcomm.device import WARP, Mailbox
from nvcomm.errors import GroupError
from nvcomm.handle import Handle
from nvcomm.mailbox import CHUNK_WORDS, EMPTY, MailboxLayout

if TYPE_CHECKING:
    from nvcomm.memory.symmetric import SymmetricMemory
    from nvcomm.memory.virtual import VirtualMemory


@dataclass(frozen=True, slots=True)
class MarkerConfig:
    """What the kernel is compiled for.

    Attributes:
        layout: the mailbox.
        multicast: how this communicator publishes; without it a store per rank, as tests do.
        threads: threads of a CTA, as many as the all-gather's.
    """

    layout: MailboxLayout
    multicast: bool
    threads: int = 256

    @property
    def row_chunks(self) -> int:
        """Chunks of a row, whole records of them."""
        return self.layout.records_per_row * mailbox.CHUNKS_PER_RECORD


class MarkerKernel:
    """Publishes EMPTY over the rows, records and headers of one rank, in every slot of every mailbox."""

    def __init__(self, config: MarkerConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        peers: list[Int64],
        multicast_ptr: Int64,
        state: Int64,
        rank: Int32,
        word: Uint32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches the kernel.

        Args:
            peers, multicast_ptr, state, rank: see `nvcomm.handle.Handle`.
            word: EMPTY; a run-time value, as multimem.st takes no constant.
            ctas: CTAs of the grid: those of an all-gather of whole rows.
            stream: where it runs.
        """
        self.kernel(peers, multicast_ptr, state, rank, word).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, peers: list[Int64], multicast_ptr: Int64, state: Int64, rank: Int32, word: Uint32) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        first = cta * config.threads + thread
        lane = thread % WARP
        for slot in range_constexpr(mailbox.NUM_SLOTS):
            handle = Handle(peers, multicast_ptr, state, Int64(0), Int64(0), rank)
            box = Mailbox(config.layout, config.multicast, handle, Uint32(slot), Uint32(0), None)
            chunk = first
            while chunk < config.row_chunks:  # a multiple of 32: loops are uniform over a warp
                device.publish_words(box, box.row(rank) + Int64(chunk) * mailbox.CHUNK_BYTES, (word,) * CHUNK_WORDS)
                if lane % CHUNK_WORDS == 0:
                    record = box.record(rank, chunk // mailbox.CHUNKS_PER_RECORD)
                    device.publish_word(box, record + Int64(lane // CHUNK_WORDS) * mailbox.WORD_BYTES, word)
                chunk += num_ctas * config.threads
            if first < mailbox.HEADER_WORDS:
                header = Int64(config.layout.header_offset(slot, Int64(rank)))
                device.publish_word(box, header + Int64(first) * mailbox.WORD_BYTES, word)


def fake_args(world_size: int) -> tuple[object, ...]:
    """Placeholders for the parameters of `MarkerKernel.__call__`."""
    return [Int64(0)] * world_size, Int64(0), Int64(0), Int32(0), Uint32(EMPTY), Int32(1), make_fake_stream()


class Marker:
    """One rank's part in the markers of `reset()`: blank the own mailbox, meet the others, publish, wait.

    Args:
        memory: the mailboxes.
        layout: what lies where in them.
        state: address of the rank's state block.
        max_ctas: most CTAs of an all-gather.
        threads: of its CTAs.
    """

    def __init__(
        self, memory: VirtualMemory | SymmetricMemory, layout: MailboxLayout, state: int, *, max_ctas: int, threads: int
    ) -> None:
        self._memory = memory
        self._layout = layout
        config = MarkerConfig(layout, memory.multicast_ptr != 0, threads)
        ctas = min(max_ctas, -(-config.row_chunks // threads))
        peers = [memory.peer_ptrs[(memory.rank + i) % memory.world_size] for i in range(memory.world_size)]
        self._args = (peers, memory.multicast_ptr, state, memory.rank, EMPTY, ctas)
        self._kernel = jit.compile_kernel(MarkerKernel(config), *fake_args(memory.world_size), key=(config,))
        jit.preload(self._kernel)

    @property
    def _words(self) -> torch.Tensor:
        return self._memory.local()[: self._layout.faults_base // mailbox.WORD_BYTES]

    def blank(self) -> None:
        """Stores 0, which is not EMPTY, over the own mailbox; waits for the device. Own grids have ended."""
        self._words.zero_()
        torch.cuda.synchronize(self._words.device)

    def publish(self) -> None:
        """Launches the own markers on the current stream. All ranks have blanked their mailboxes."""
        self._kernel(*self._args, torch.cuda.current_stream(self._words.device).cuda_stream)

    def wait(self, timeout_s: float) -> None:
        """Returns once every rank's markers are there.

        Raises:
            GroupError: a word was not EMPTY `timeout_s` later; `missing` has the ranks whose rows they are in.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self.missing():
            if time.monotonic() > deadline:
                raise GroupError(
                    f"rank {self._memory.rank}: reset() waited {timeout_s} s for the markers of ranks {list(missing)}, "
                    "which follow every word that these have sent. Build a new communicator.",
                    missing,
                )

    def missing(self) -> tuple[int, ...]:
        """Ranks whose markers have not all arrived; waits for the device."""
        layout = self._layout
        ends = (0, layout.records_base, layout.headers_base, layout.faults_base)
        sizes = [(end - start) // mailbox.WORD_BYTES for start, end in itertools.pairwise(ends)]
        shape = (mailbox.NUM_SLOTS, layout.world_size, -1)  # rows, records and headers alike
        left = [part.view(shape).any(2).any(0) for part in (self._words != EMPTY - 2**32).split(sizes)]
        return tuple(torch.stack(left).any(0).nonzero().flatten().tolist())
