# SPDX-License-Identifier: Apache-2.0
"""Sublayer boundaries on the device: a kernel that fills what one takes, and one that says what has to come out.

The second checks, or for the negative control computes a boundary from a sum that was formed elsewhere. Everything is a
whole number, so that FP32 holds it exactly up to the two roundings to bf16; the norm's output is compared to one unit
in the last place. A CTA takes a row, a thread every 256th pair of columns of it.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm.jit import CompiledKernel, compile_kernel
from nvcomm.ptx import arith, cluster, mma
from nvcomm.ptx import memory as ptx
from stress import oracle, sum_oracle
from stress.device_oracle import THREADS, WORD
from stress.sum_oracle import COMB, EPS, POST, PRE, STREAMS
from stress.sums import contribution, differs, pair, record

WARP = 32
WARPS = THREADS // WARP
NAN = 0x7FC00000


def factor(key: Uint32, index: Int32) -> Float32:
    """One of post and comb: 0 to 3."""
    return Float32(Int32(sum_oracle.small(key, Uint32(index), 2, Uint32)))


def pre_factor(key: Uint32, index: Int32) -> Float32:
    """One of pre: 1 to 4, so that something is left of every row."""
    return arith.add_rn(factor(key, index), Float32(1))


def stream_word(key: Uint32, index: Int32) -> Uint32:
    """Two numbers of a residual stream, as bf16."""
    word = oracle.payload(key, Uint32(index), Uint32(0), Uint32)
    return pair(word & Uint32(31), (word >> Uint32(16)) & Uint32(31))


class FillKernel:
    """What a boundary takes: a rank's contribution, and residual streams and factors that all ranks share."""

    def __init__(self, hidden: int) -> None:
        self.words = hidden // 2

    @cute.jit
    def __call__(
        self,
        x: Int64,
        residual: Int64,
        post: Int64,
        comb: Int64,
        pre: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        rank: Int32,
        gather: Int32,
        rows: Int32,
        cell: Int32,
        step: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches it; addresses of tensors as `AllReduceMhc` takes them, the rest as for `SumTurnKernel`."""
        self.kernel(
            x, residual, post, comb, pre, ledger_ptr, seed_key, reserved, rank, gather, rows, cell, step
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1)

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        residual: Int64,
        post: Int64,
        comb: Int64,
        pre: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        rank: Int32,
        gather: Int32,
        rows: Int32,
        cell: Int32,
        step: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        replay = ptx.ld_relaxed_gpu(ledger_ptr + Int64(cell) * WORD) + Uint32(step)
        own = oracle.key(seed_key, Uint32(rank), Uint32(gather), replay, Uint32)
        common = sum_oracle.common_key(seed_key, Uint32(gather), replay, Uint32)
        while row < rows:
            some = sum_oracle.reserved_in(Uint32(row), reserved, Uint32)
            column = thread
            while column < self.words:
                index = row * self.words + column
                ptx.st_weak_b32(x + Int64(index) * WORD, contribution(own, index, some))
                for s in range_constexpr(STREAMS):
                    index = (row * STREAMS + s) * self.words + column
                    ptx.st_weak_b32(residual + Int64(index) * WORD, stream_word(common, index))
                column += THREADS
            if thread < STREAMS:
                index = row * STREAMS + thread
                ptx.st_weak_b32(post + Int64(index) * WORD, arith.f32_bits(factor(common, index + POST)))
                ptx.st_weak_b32(pre + Int64(index) * WORD, arith.f32_bits(pre_factor(common, index + PRE)))
            if thread < STREAMS * STREAMS:
                index = row * (STREAMS * STREAMS) + thread
                ptx.st_weak_b32(comb + Int64(index) * WORD, arith.f32_bits(factor(common, index + COMB)))
            row += num_ctas


class BoundaryKernel:
    """Says what comes out of a boundary.

    Args:
        world_size: of the contributions.
        hidden: values of a row.
        compare: whether to compare with what lies there, or to compute from a sum and write.
    """

    def __init__(self, world_size: int, hidden: int, compare: bool) -> None:
        self.world_size = world_size
        self.hidden = hidden
        self.words = hidden // 2
        self.compare = compare

    @cute.jit
    def __call__(
        self,
        y: Int64,
        new_residual: Int64,
        h: Int64,
        norm_weight: Int64,
        scratch: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        gather: Int32,
        rows: Int32,
        cell: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches it.

        Args:
            y: the sum of the contributions (rows, hidden) bf16; not read where results are compared.
            new_residual, h: results, (rows, 4, hidden) and (rows, hidden) bf16.
            norm_weight: (hidden,) bf16.
            scratch: room for (rows, hidden) bf16.
            ledger_ptr, seed_key, reserved, cell, ctas, stream: as for `SumTurnKernel`.
            gather: which of the replay's collectives it is.
            rows: of the boundary.
        """
        self.kernel(
            y, new_residual, h, norm_weight, scratch, ledger_ptr, seed_key, reserved, gather, rows, cell
        ).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), smem=WARPS * WORD, stream=stream, preferred_smem_carveout=-1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        y: Int64,
        new_residual: Int64,
        h: Int64,
        norm_weight: Int64,
        scratch: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        gather: Int32,
        rows: Int32,
        cell: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        smem = cluster.shared_base()
        replay = ptx.ld_relaxed_gpu(ledger_ptr + Int64(cell) * WORD)
        while row < rows:
            squares = self.mix(y, new_residual, scratch, ledger_ptr, seed_key, reserved, gather, row, replay, thread)
            mean = arith.mul_rn(self.row_sum(smem, squares, thread), Float32(1.0 / self.hidden))
            scale = arith.rsqrt(arith.add_rn(mean, Float32(EPS)))
            column = thread
            while column < self.words:
                index = row * self.words + column
                low, high = mma.cvt_bf16x2_f32(ptx.ld_weak_b32(scratch + Int64(index) * WORD))
                w_low, w_high = mma.cvt_bf16x2_f32(ptx.ld_weak_b32(norm_weight + Int64(column) * WORD))
                want = mma.cvt_rn_bf16x2(
                    arith.mul_rn(arith.mul_rn(low, scale), w_low), arith.mul_rn(arith.mul_rn(high, scale), w_high)
                )
                self.settle(h, index, want, 1, ledger_ptr, gather, replay)
                column += THREADS
            row += num_ctas

    @cute.jit
    def mix(
        self,
        y: Int64,
        new_residual: Int64,
        scratch: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        gather: Int32,
        row: Int32,
        replay: Uint32,
        thread: Int32,
    ) -> Float32:
        """New streams and the collapsed row; returns this thread's share of the collapsed row's sum of squares."""
        common = sum_oracle.common_key(seed_key, Uint32(gather), replay, Uint32)
        post = [factor(common, row * STREAMS + t + POST) for t in range(STREAMS)]
        pre = [pre_factor(common, row * STREAMS + t + PRE) for t in range(STREAMS)]
        comb = [
            [factor(common, (row * STREAMS + s) * STREAMS + t + COMB) for t in range(STREAMS)] for s in range(STREAMS)
        ]
        squares = Float32(0)
        column = thread
        while column < self.words:
            low, high = self.summed(y, seed_key, reserved, gather, row, row * self.words + column, replay)
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
                self.settle(
                    new_residual, (row * STREAMS + t) * self.words + column, word, 0, ledger_ptr, gather, replay
                )
                new_low, new_high = mma.cvt_bf16x2_f32(word)
                one, other = arith.fma_rn(new_low, pre[t], one), arith.fma_rn(new_high, pre[t], other)
            collapsed = mma.cvt_rn_bf16x2(one, other)
            ptx.st_weak_b32(scratch + Int64(row * self.words + column) * WORD, collapsed)
            one, other = mma.cvt_bf16x2_f32(collapsed)
            squares = arith.fma_rn(one, one, arith.fma_rn(other, other, squares))
            column += THREADS
        return squares

    @cute.jit
    def summed(
        self, y: Int64, seed_key: Uint32, reserved: Uint32, gather: Int32, row: Int32, index: Int32, replay: Uint32
    ) -> tuple[Float32, Float32]:
        """The two sums of a word: as they have to be, or as they were formed elsewhere."""
        if const_expr(not self.compare):
            return mma.cvt_bf16x2_f32(ptx.ld_weak_b32(y + Int64(index) * WORD))
        some = sum_oracle.reserved_in(Uint32(row), reserved, Uint32)
        words = []
        for r in range_constexpr(self.world_size):
            key = oracle.key(seed_key, Uint32(r), Uint32(gather), replay, Uint32)
            words.append(oracle.payload(key, Uint32(index), some, Uint32))
        sums, lost = sum_oracle.total(words, Uint32)
        nan = mma.bits_f32(lost * Uint32(NAN))  # 0 or NaN
        low, high = Float32(Int32(sums & Uint32(0xFFFF))), Float32(Int32(sums >> Uint32(16)))
        return arith.add_rn(low, nan), arith.add_rn(high, nan)

    @cute.jit
    def settle(
        self, results: Int64, index: Int32, want: Uint32, part: int, ledger_ptr: Int64, gather: Int32, replay: Uint32
    ) -> None:
        """Compares a word of a result with what it has to be, or writes it."""
        addr = results + Int64(index) * WORD
        if const_expr(self.compare):
            seen = ptx.ld_weak_b32(addr)
            if differs(seen, want, part):  # the norm's output, part 1, may be one unit off
                record(ledger_ptr, replay, gather, part, index, seen, want)
        else:
            ptx.st_weak_b32(addr, want)

    @cute.jit
    def row_sum(self, smem: Uint32, value: Float32, thread: Int32) -> Float32:
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


def fill_args() -> tuple[object, ...]:
    """Placeholders for the parameters of `FillKernel`."""
    return (*[Int64(0)] * 6, Uint32(0), Uint32(0), *[Int32(0)] * 5, Int32(1), make_fake_stream())


def boundary_args() -> tuple[object, ...]:
    """Placeholders for the parameters of `BoundaryKernel`."""
    return (*[Int64(0)] * 6, Uint32(0), Uint32(0), *[Int32(0)] * 3, Int32(1), make_fake_stream())


def compile_fill(hidden: int) -> CompiledKernel:
    """What fills the inputs of boundaries."""
    return compile_kernel(FillKernel(hidden), *fill_args(), key=(hidden,))


def compile_boundary(world_size: int, hidden: int, *, compare: bool) -> CompiledKernel:
    """What checks or computes the outputs of boundaries."""
    return compile_kernel(
        BoundaryKernel(world_size, hidden, compare), *boundary_args(), key=(world_size, hidden, compare)
    )
