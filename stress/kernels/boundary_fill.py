# SPDX-License-Identifier: Apache-2.0
"""A kernel that fills what a sublayer boundary takes. A CTA takes a row, a thread every 256th pair of columns of it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from nvcomm.ptx import arith
from nvcomm.ptx import memory as ptx
from stress import sum_oracle
from stress.kernels.boundary_words import common_key, factor, pre_factor, stream_word
from stress.kernels.kernel import THREADS, WORD, Place, RankHandle, StressKernel, key_of
from stress.kernels.sum_words import contribution
from stress.sum_oracle import COMB, POST, PRE, STREAMS


class BoundaryInputs(NamedTuple):
    """What to fill.

    Attributes:
        x, residual, post, comb, pre: addresses of tensors as `AllReduceMhc` takes them.
        gather: which of the replay's collectives it is.
        rows: of the boundary.
        cell: the ledger cell that holds the number of a replay.
        step: 1 if the replay to fill is the next one, else 0.
    """

    x: Int64
    residual: Int64
    post: Int64
    comb: Int64
    pre: Int64
    gather: Int32
    rows: Int32
    cell: Int32
    step: Int32


class BoundaryFillKernel(StressKernel):
    """A rank's contribution, and residual streams and factors that all ranks share; of `hidden` values a row."""

    work = BoundaryInputs

    def __init__(self, hidden: int) -> None:
        self.words = hidden // 2
        self.key = (hidden,)

    @cute.kernel
    def kernel(self, work: BoundaryInputs, handle: RankHandle) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        place = Place(work.gather, ptx.ld_relaxed_gpu(handle.ledger + Int64(work.cell) * WORD) + Uint32(work.step))
        own, common = key_of(handle, handle.rank, place), common_key(handle, place)
        while row < work.rows:
            some = sum_oracle.reserved_in(Uint32(row), handle.reserved, Uint32)
            column = thread
            while column < self.words:
                index = row * self.words + column
                ptx.st_weak_b32(work.x + Int64(index) * WORD, contribution(own, index, some))
                for s in range_constexpr(STREAMS):
                    index = (row * STREAMS + s) * self.words + column
                    ptx.st_weak_b32(work.residual + Int64(index) * WORD, stream_word(common, index))
                column += THREADS
            if thread < STREAMS:
                index = row * STREAMS + thread
                ptx.st_weak_b32(work.post + Int64(index) * WORD, arith.f32_bits(factor(common, index + POST)))
                ptx.st_weak_b32(work.pre + Int64(index) * WORD, arith.f32_bits(pre_factor(common, index + PRE)))
            if thread < STREAMS * STREAMS:
                index = row * (STREAMS * STREAMS) + thread
                ptx.st_weak_b32(work.comb + Int64(index) * WORD, arith.f32_bits(factor(common, index + COMB)))
            row += num_ctas
