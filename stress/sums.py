# SPDX-License-Identifier: Apache-2.0
"""Sums on the device: a kernel that checks them and fills what comes next, and one that adds up gathered rows.

The first stands right before a turn (`device_oracle.py`), whose ledger cell it reads, and does for sums what that does
for gathers. The second makes an all-reduce of an all-gather, as one-shot protocols do: the negative control of sums is
the known-bad gather with it behind.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm.jit import CompiledKernel, compile_kernel
from nvcomm.ptx import arith, mma
from nvcomm.ptx import memory as ptx
from stress import ledger, oracle, sum_oracle
from stress.device_oracle import THREADS, WORD

NAN_PAIR = 0x7FFF7FFF


def pair(low: Uint32, high: Uint32) -> Uint32:
    """Two whole numbers as bf16."""
    return mma.cvt_rn_bf16x2(Float32(Int32(low)), Float32(Int32(high)))


def differs(seen: Uint32, want: Uint32, ulps: int = 0) -> Boolean:
    """Whether two pairs of bf16 are more than so many units in the last place apart; NaN is equal to NaN.

    With `ulps` for numbers of one sign alone, whose bits are in order.
    """
    different = Boolean(False)
    for shift in (0, 16):
        a, b = (Int32((word >> Uint32(shift)) & Uint32(0xFFFF)) for word in (seen, want))
        apart = Boolean(a > b + ulps) | Boolean(b > a + ulps)
        different = different | (apart & (is_number(a) | is_number(b)))
        different = different | (is_number(a) ^ is_number(b))
    return different


def is_number(half: Int32) -> Boolean:
    """Whether a bf16 is not NaN."""
    return Boolean((half & Int32(0x7FFF)) <= Int32(0x7F80))


@cute.jit
def record(
    ledger_ptr: Int64, replay: Uint32, gather: Int32, part: int, index: Int32, seen: Uint32, want: Uint32
) -> None:
    """Counts a wrong word; the first one leaves its place, its bits and what had to be there."""
    ptx.red_add_relaxed_gpu(ledger_ptr + ledger.BAD_WORDS * WORD, Uint32(1))
    if ptx.atom_cas_relaxed_gpu(ledger_ptr + ledger.LOCK * WORD, Uint32(0), Uint32(1)) == 0:
        fields = (replay, Uint32(gather), Uint32(part), Uint32(index), seen)
        for i in range_constexpr(len(fields)):
            ptx.st_relaxed_gpu(ledger_ptr + (ledger.FIRST_REPLAY + i) * WORD, fields[i])
        ptx.st_relaxed_gpu(ledger_ptr + ledger.FIRST_WANTED * WORD, want)


class SumTurnKernel:
    """Check and fill, for one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @cute.jit
    def __call__(
        self,
        x: Int64,
        x_stride: Int64,
        out: Int64,
        out_stride: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        rank: Int32,
        start_words: list[Int32],
        stop_words: list[Int32],
        fill_words: list[Int32],
        checked: Int32,
        cell: Int32,
        step: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches it; `x` to `rank` as for `TurnKernel`.

        Args:
            start_words, stop_words: which words of each sum this rank holds, at `out`; equal: nothing.
            fill_words: words of each input to fill; 0: nothing.
            checked: how many collectives are checked, here and by other kernels.
            cell: the ledger cell that holds the number of the replay to check.
            step: 1 if the replay to fill is the next one, else 0.
            ctas: grid size.
            stream: where to.
        """
        self.kernel(
            x, x_stride, out, out_stride, ledger_ptr, seed_key, reserved, rank, start_words, stop_words, fill_words,
            checked, cell, step,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_stride: Int64,
        out: Int64,
        out_stride: Int64,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        rank: Int32,
        start_words: list[Int32],
        stop_words: list[Int32],
        fill_words: list[Int32],
        checked: Int32,
        cell: Int32,
        step: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        first, stride = cta * THREADS + thread, num_ctas * THREADS
        replay = ptx.ld_relaxed_gpu(ledger_ptr + Int64(cell) * WORD)
        for gather in range_constexpr(oracle.GATHERS_PER_REPLAY):
            start, stop = start_words[gather], stop_words[gather]
            keys = [oracle.key(seed_key, Uint32(r), Uint32(gather), replay, Uint32) for r in range(self.world_size)]
            self.check(
                out + gather * out_stride, start, stop, ledger_ptr, keys, reserved, gather, replay, first, stride
            )
            key = oracle.key(seed_key, Uint32(rank), Uint32(gather), replay + Uint32(step), Uint32)
            fill(x + gather * x_stride, fill_words[gather], key, reserved, first, stride)
        if first == 0:
            ptx.red_add_relaxed_gpu(ledger_ptr + ledger.GATHERS * WORD, Uint32(checked))

    @cute.jit
    def check(
        self,
        out: Int64,
        start: Int32,
        stop: Int32,
        ledger_ptr: Int64,
        keys: list[Uint32],
        reserved: Uint32,
        gather: int,
        replay: Uint32,
        first: Int32,
        stride: Int32,
    ) -> None:
        """Compares this thread's words of a sum."""
        index = start + first
        while index < stop:
            seen = ptx.ld_weak_b32(out + Int64(index - start) * WORD)
            words = [oracle.payload(key, Uint32(index), reserved, Uint32) for key in keys]
            sums, lost = sum_oracle.total(words, Uint32)
            want = pair(sums & Uint32(0xFFFF), sums >> Uint32(16)) | (lost * Uint32(NAN_PAIR))
            if differs(seen, want):
                record(ledger_ptr, replay, Int32(gather), 0, index, seen, want)
            index += stride


@cute.jit
def fill(x: Int64, words: Int32, key: Uint32, reserved: Uint32, first: Int32, stride: Int32) -> None:
    """Writes this thread's words of a contribution."""
    index = first
    while index < words:
        ptx.st_weak_b32(x + Int64(index) * WORD, contribution(key, index, reserved))
        index += stride


def contribution(key: Uint32, index: Int32, reserved: Uint32) -> Uint32:
    """The two bf16 that a rank contributes at a word; a reserved word as it is."""
    word = oracle.payload(key, Uint32(index), reserved, Uint32)
    lost = sum_oracle.is_reserved(word, Uint32)
    sums = sum_oracle.numbers(word, Uint32)
    plain = pair(sums & Uint32(0xFFFF), sums >> Uint32(16))
    return plain ^ ((plain ^ word) * lost)


class AddRowsKernel:
    """Adds up gathered rows of bf16, in FP32 and from the first on."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @cute.jit
    def __call__(
        self, rows: Int64, words: Int32, start: Int32, stop: Int32, out: Int64, ctas: Int32, stream: CUstream
    ) -> None:
        """Launches it: words `start` to `stop - 1` of the sum of `rows`, of `words` words each, to `out`."""
        self.kernel(rows, words, start, stop, out).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1
        )

    @cute.kernel
    def kernel(self, rows: Int64, words: Int32, start: Int32, stop: Int32, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        index = start + cta * THREADS + thread
        while index < stop:
            low, high = Float32(0), Float32(0)
            for r in range_constexpr(self.world_size):
                word = ptx.ld_weak_b32(rows + (Int64(r) * Int64(words) + Int64(index)) * WORD)
                more_low, more_high = mma.cvt_bf16x2_f32(word)
                low, high = arith.add_rn(low, more_low), arith.add_rn(high, more_high)
            ptx.st_weak_b32(out + Int64(index - start) * WORD, mma.cvt_rn_bf16x2(low, high))
            index += num_ctas * THREADS


def turn_args() -> tuple[object, ...]:
    """Placeholders for the parameters of `SumTurnKernel`."""
    none = [Int32(0)] * oracle.GATHERS_PER_REPLAY
    pointers = (Int64(0), Int64(0), Int64(0), Int64(0), Int64(0))
    return (*pointers, Uint32(0), Uint32(0), Int32(0), none, none, none, *[Int32(0)] * 3, Int32(1), make_fake_stream())


def add_args() -> tuple[object, ...]:
    """Placeholders for the parameters of `AddRowsKernel`."""
    return (Int64(0), Int32(1), Int32(0), Int32(0), Int64(0), Int32(1), make_fake_stream())


def compile_sum_turn(world_size: int) -> CompiledKernel:
    """The check and fill of a world size."""
    return compile_kernel(SumTurnKernel(world_size), *turn_args(), key=(world_size,))


def compile_add_rows(world_size: int) -> CompiledKernel:
    """The sum of a world size's rows."""
    return compile_kernel(AddRowsKernel(world_size), *add_args(), key=(world_size,))
