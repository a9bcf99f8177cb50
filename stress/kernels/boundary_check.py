# SPDX-License-Identifier: Apache-2.0
"""A kernel that says what has to come out of a sublayer boundary. A CTA takes a row.

It checks, or for the negative control computes a boundary from a sum that was formed elsewhere. New streams are
compared bit for bit; the normed output to one unit in the last place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm.ptx import arith, cluster, mma
from nvcomm.ptx import memory as ptx
from stress import oracle, sum_oracle
from stress.kernels.boundary_words import common_key, factor, pre_factor, stream_word
from stress.kernels.kernel import THREADS, WORD, Place, RankHandle, StressKernel, key_of
from stress.kernels.record import record
from stress.kernels.sum_words import differs
from stress.sum_oracle import COMB, EPS, POST, PRE, STREAMS

WARP = 32
WARPS = THREADS // WARP
NAN = 0x7FC00000


class BoundaryOutputs(NamedTuple):
    """What to check, or to compute.

    Attributes:
        y: the sum of the contributions (rows, hidden) bf16; not read where results are compared.
        new_residual, h: results, (rows, 4, hidden) and (rows, hidden) bf16.
        norm_weight: (hidden,) bf16.
        scratch: room for (rows, hidden) bf16.
        gather: which of the replay's collectives it is.
        rows: of the boundary.
        cell: the ledger cell that holds the number of the replay.
    """

    y: Int64
    new_residual: Int64
    h: Int64
    norm_weight: Int64
    scratch: Int64
    gather: Int32
    rows: Int32
    cell: Int32


class BoundaryCheckKernel(StressKernel):
    """Says what comes out of a boundary.

    Args:
        world_size: of the contributions.
        hidden: values of a row.
        compare: whether to compare with what lies there, or to compute from a sum and write.
    """

    work = BoundaryOutputs
    shared_bytes = WARPS * WORD

    def __init__(self, world_size: int, hidden: int, *, compare: bool) -> None:
        self.world_size = world_size
        self.hidden = hidden
        self.words = hidden // 2
        self.compare = compare
        self.key = (world_size, hidden, compare)

    @cute.kernel
    def kernel(self, work: BoundaryOutputs, handle: RankHandle) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        smem = cluster.shared_base()
        place = Place(work.gather, ptx.ld_relaxed_gpu(handle.ledger + Int64(work.cell) * WORD))
        while row < work.rows:
            squares = self.mix(work, handle, place, row, thread)
            mean = arith.mul_rn(row_sum(smem, squares, thread), Float32(1.0 / self.hidden))
            scale = arith.rsqrt(arith.add_rn(mean, Float32(EPS)))
            column = thread
            while column < self.words:
                index = row * self.words + column
                low, high = mma.cvt_bf16x2_f32(ptx.ld_weak_b32(work.scratch + Int64(index) * WORD))
                w_low, w_high = mma.cvt_bf16x2_f32(ptx.ld_weak_b32(work.norm_weight + Int64(column) * WORD))
                want = mma.cvt_rn_bf16x2(
                    arith.mul_rn(arith.mul_rn(low, scale), w_low), arith.mul_rn(arith.mul_rn(high, scale), w_high)
                )
                self.settle(work.h, index, want, 1, handle, place)
                column += THREADS
            row += num_ctas

    @cute.jit
    def mix(self, work: BoundaryOutputs, handle: RankHandle, place: Place, row: Int32, thread: Int32) -> Float32:
        """New streams and the collapsed row; returns this thread's share of the collapsed row's sum of squares."""
        common = common_key(handle, place)
        post = [factor(common, row * STREAMS + t + POST) for t in range(STREAMS)]
        pre = [pre_factor(common, row * STREAMS + t + PRE) for t in range(STREAMS)]
        comb = [
            [factor(common, (row * STREAMS + s) * STREAMS + t + COMB) for t in range(STREAMS)] for s in range(STREAMS)
        ]
        squares = Float32(0)
        column = thread
        while column < self.words:
            low, high = self.summed(work.y, handle, place, row, row * self.words + column)
            old = []
            for s in range_constexpr(STREAMS):
                index = (row * STREAMS + s) * self.words + column
                old.append(mma.cvt_bf16x2_f32(stream_word(common, index)))
            one, other = Float32(0), Float32(0)
            for t in range_constexpr(STREAMS):
                mixed_low, mixed_high = arith.mul_rn(low, post[t]), arith.mul_rn(high, post[t])
                for s in range_constexpr(STREAMS):
                    mixed_low = arith.fma_rn(old[s][0], comb[s][t], mixed_low)
                    mixed_high = arith.fma_rn(old[s][1], comb[s][t], mixed_high)
                word = mma.cvt_rn_bf16x2(mixed_low, mixed_high)
                self.settle(work.new_residual, (row * STREAMS + t) * self.words + column, word, 0, handle, place)
                new_low, new_high = mma.cvt_bf16x2_f32(word)
                one, other = arith.fma_rn(new_low, pre[t], one), arith.fma_rn(new_high, pre[t], other)
            collapsed = mma.cvt_rn_bf16x2(one, other)
            ptx.st_weak_b32(work.scratch + Int64(row * self.words + column) * WORD, collapsed)
            one, other = mma.cvt_bf16x2_f32(collapsed)
            squares = arith.fma_rn(one, one, arith.fma_rn(other, other, squares))
            column += THREADS
        return squares

    @cute.jit
    def summed(self, y: Int64, handle: RankHandle, place: Place, row: Int32, index: Int32) -> tuple[Float32, Float32]:
        """The two sums of a word: as they have to be, or as they were formed elsewhere."""
        if const_expr(not self.compare):
            return mma.cvt_bf16x2_f32(ptx.ld_weak_b32(y + Int64(index) * WORD))
        some = sum_oracle.reserved_in(Uint32(row), handle.reserved, Uint32)
        words = []
        for r in range_constexpr(self.world_size):
            words.append(oracle.payload(key_of(handle, r, place), Uint32(index), some, Uint32))
        sums, lost = sum_oracle.total(words, Uint32)
        nan = mma.bits_f32(lost * Uint32(NAN))  # 0 or NaN
        low, high = Float32(Int32(sums & Uint32(0xFFFF))), Float32(Int32(sums >> Uint32(16)))
        return arith.add_rn(low, nan), arith.add_rn(high, nan)

    @cute.jit
    def settle(self, results: Int64, index: Int32, want: Uint32, part: int, handle: RankHandle, place: Place) -> None:
        """Compares a word of a result with what it has to be, or writes it."""
        addr = results + Int64(index) * WORD
        if const_expr(self.compare):
            seen = ptx.ld_weak_b32(addr)
            if differs(seen, want, part):  # the norm's output, part 1, may be one unit off
                record(handle.ledger, place, part, index, seen, want)
        else:
            ptx.st_weak_b32(addr, want)


@cute.jit
def row_sum(smem: Uint32, value: Float32, thread: Int32) -> Float32:
    """Sum of `value` over the CTA; every thread gets it."""
    for step in range_constexpr(int(math.log2(WARP))):
        value = arith.add_rn(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    cute.arch.sync_threads()  # the row before has been read
    if thread % WARP == 0:
        cluster.st_shared(smem + Uint32(thread // WARP * WORD), arith.f32_bits(value))
    cute.arch.sync_threads()
    total = Float32(0)
    for i in range_constexpr(WARPS):
        total = arith.add_rn(total, mma.bits_f32(cluster.ld_shared(smem + Uint32(i * WORD))))
    return total
