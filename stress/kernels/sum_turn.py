# SPDX-License-Identifier: Apache-2.0
"""The turn of sums: a kernel right before a turn, whose ledger cell it reads. It does for sums what that one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from nvcomm.ptx import memory as ptx
from stress import ledger, oracle, sum_oracle
from stress.kernels.kernel import THREADS, WORD, Place, RankHandle, Share, StressKernel, key_of
from stress.kernels.record import record
from stress.kernels.sum_words import NAN_PAIR, contribution, differs, pair_of


class SumTurn(NamedTuple):
    """One turn.

    Attributes:
        start_words, stop_words: which words of each sum this rank holds, in its output; equal: nothing.
        fill_words: words of each input to fill; 0: nothing.
        checked: how many collectives are checked, here and by the boundaries' kernel.
        cell: the ledger cell that holds the number of the replay to check.
        step: 1 if the replay to fill is the next one, else 0.
    """

    start_words: Sequence[Int32]
    stop_words: Sequence[Int32]
    fill_words: Sequence[Int32]
    checked: Int32
    cell: Int32
    step: Int32


class SumTurnKernel(StressKernel):
    """Check and fill, for one world size."""

    work = SumTurn

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.key = (world_size,)

    @cute.kernel
    def kernel(self, work: SumTurn, handle: RankHandle) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        share = Share(cta * THREADS + thread, num_ctas * THREADS)
        replay = ptx.ld_relaxed_gpu(handle.ledger + Int64(work.cell) * WORD)
        for gather in range_constexpr(oracle.GATHERS_PER_REPLAY):
            place, coming = Place(gather, replay), Place(gather, replay + Uint32(work.step))
            self.check(work.start_words[gather], work.stop_words[gather], handle, place, share)
            self.fill(work.fill_words[gather], handle, coming, share)
        if share.first == 0:
            ptx.red_add_relaxed_gpu(handle.ledger + ledger.GATHERS * WORD, Uint32(work.checked))

    @cute.jit
    def check(self, start: Int32, stop: Int32, handle: RankHandle, place: Place, share: Share) -> None:
        """Compares this thread's words of a sum."""
        out = handle.out + place.gather * handle.out_stride
        keys = [key_of(handle, r, place) for r in range(self.world_size)]
        index = start + share.first
        while index < stop:
            seen = ptx.ld_weak_b32(out + Int64(index - start) * WORD)
            words = [oracle.payload(key, Uint32(index), handle.reserved, Uint32) for key in keys]
            sums, lost = sum_oracle.total(words, Uint32)
            want = pair_of(sums) | (lost * Uint32(NAN_PAIR))
            if differs(seen, want):
                record(handle.ledger, place, 0, index, seen, want)
            index += share.stride

    @cute.jit
    def fill(self, words: Int32, handle: RankHandle, place: Place, share: Share) -> None:
        """Writes this thread's words of a contribution."""
        x = handle.x + place.gather * handle.x_stride
        key = key_of(handle, handle.rank, place)
        index = share.first
        while index < words:
            ptx.st_weak_b32(x + Int64(index) * WORD, contribution(key, index, handle.reserved))
            index += share.stride
