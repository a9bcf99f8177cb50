# SPDX-License-Identifier: Apache-2.0
"""The turn: a kernel that stands between gathers, checks what was gathered and fills what comes next.

It compares the outputs of up to three gathers of one replay with the oracle, counts the wrong words in the rank's
ledger and keeps the first one, and writes the inputs of up to three gathers of the same or of the next replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from nvcomm.ptx import memory as ptx
from stress import ledger, oracle
from stress.kernels.kernel import THREADS, WORD, Place, RankHandle, Share, StressKernel, key_of
from stress.kernels.record import record


class Turn(NamedTuple):
    """One turn.

    Attributes:
        check_words: words per row of each gather to check; 0: nothing.
        fill_words: words of each input to fill; 0: nothing.
        cell_in: the ledger cell that holds the number of the replay to check.
        cell_out: the cell to write the number of the replay to fill to; another one than `cell_in`.
        step: 1 if the replay to fill is the next one, else 0.
    """

    check_words: Sequence[Int32]
    fill_words: Sequence[Int32]
    cell_in: Int32
    cell_out: Int32
    step: Int32


class TurnKernel(StressKernel):
    """Check and fill, for one world size."""

    work = Turn

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.key = (world_size,)

    @cute.kernel
    def kernel(self, work: Turn, handle: RankHandle) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        share = Share(cta * THREADS + thread, num_ctas * THREADS)
        replay = ptx.ld_relaxed_gpu(handle.ledger + Int64(work.cell_in) * WORD)
        next_replay = replay + Uint32(work.step)
        checked = Uint32(0)
        for gather in range_constexpr(oracle.GATHERS_PER_REPLAY):
            words = work.check_words[gather]
            checked += Uint32(words > 0)
            self.check(words, handle, Place(gather, replay), share)
            self.fill(work.fill_words[gather], handle, Place(gather, next_replay), share)
        if share.first == 0:
            ptx.st_relaxed_gpu(handle.ledger + Int64(work.cell_out) * WORD, next_replay)
            ptx.red_add_relaxed_gpu(handle.ledger + ledger.GATHERS * WORD, checked)

    @cute.jit
    def check(self, words: Int32, handle: RankHandle, place: Place, share: Share) -> None:
        """Compares this thread's words of every row of an output; the rows' loads are in flight together."""
        out = handle.out + place.gather * handle.out_stride
        row_bytes = Int64(words) * WORD
        keys = [key_of(handle, r, place) for r in range(self.world_size)]
        index = share.first
        while index < words:
            addr = out + Int64(index) * WORD
            seen = [ptx.ld_weak_b32(addr + r * row_bytes) for r in range(self.world_size)]
            for r in range_constexpr(self.world_size):
                if seen[r] != oracle.payload(keys[r], Uint32(index), handle.reserved, Uint32):
                    record(handle.ledger, place, r, index, seen[r])
            index += share.stride

    @cute.jit
    def fill(self, words: Int32, handle: RankHandle, place: Place, share: Share) -> None:
        """Writes this thread's words of an input."""
        x = handle.x + place.gather * handle.x_stride
        row_key = key_of(handle, handle.rank, place)
        index = share.first
        while index < words:
            ptx.st_weak_b32(x + Int64(index) * WORD, oracle.payload(row_key, Uint32(index), handle.reserved, Uint32))
            index += share.stride
