# SPDX-License-Identifier: Apache-2.0
"""Makes an all-reduce of an all-gather, as one-shot protocols do.

The negative control of sums is the known-bad gather with this behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from nvcomm.ptx import arith, mma
from nvcomm.ptx import memory as ptx
from stress.kernels.kernel import THREADS, WORD, RankHandle, StressKernel


class Rows(NamedTuple):
    """Words `start` to `stop - 1` of the sum of `rows`, of `words` words each, go to `out`."""

    rows: Int64
    words: Int32
    start: Int32
    stop: Int32
    out: Int64


class AddRowsKernel(StressKernel):
    """Adds up gathered rows of bf16, in FP32 and from the first on."""

    work = Rows

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.key = (world_size,)

    @cute.kernel
    def kernel(self, work: Rows, handle: RankHandle) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        index = work.start + cta * THREADS + thread
        while index < work.stop:
            low, high = Float32(0), Float32(0)
            for r in range_constexpr(self.world_size):
                word = ptx.ld_weak_b32(work.rows + (Int64(r) * Int64(work.words) + Int64(index)) * WORD)
                more_low, more_high = mma.cvt_bf16x2_f32(word)
                low, high = arith.add_rn(low, more_low), arith.add_rn(high, more_high)
            ptx.st_weak_b32(work.out + Int64(index - work.start) * WORD, mma.cvt_rn_bf16x2(low, high))
            index += num_ctas * THREADS
