# SPDX-License-Identifier: Apache-2.0
"""The oracle on the device: a kernel that checks what was gathered and fills what comes next, and one that is late.

A *turn* stands between gathers. It compares the outputs of up to three gathers of one replay with the oracle, counts
the wrong words in the rank's ledger and keeps the first one, and writes the inputs of up to three gathers of the same
or of the next replay. Memory of a rank:

    x    GATHERS_PER_REPLAY inputs, `x_stride` bytes apart
    out  GATHERS_PER_REPLAY outputs, `out_stride` bytes apart, the rows of each without a gap

A turn is launched without programmatic dependent launch: it begins when the gather before it has ended.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm.jit import CompiledKernel, compile_kernel
from nvcomm.ptx import memory as ptx
from stress import ledger, oracle

THREADS = 256
# Enough to check 256 KiB in one pass, few enough to leave room for the gathers of the other ranks.
MAX_CTAS = 32
WORD = 4


class TurnKernel:
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
        check_words: list[Int32],
        fill_words: list[Int32],
        cell_in: Int32,
        cell_out: Int32,
        step: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches a turn.

        Args:
            x: inputs, written.
            x_stride: bytes from one input to the next.
            out: outputs, read.
            out_stride: bytes from one output to the next.
            ledger_ptr: the rank's ledger.
            seed_key: the run's key.
            reserved: how many words of 65,536 are reserved ones.
            rank: this rank.
            check_words: words per row of each gather to check; 0: nothing.
            fill_words: words of each input to fill; 0: nothing.
            cell_in: the ledger cell that holds the number of the replay to check.
            cell_out: the cell to write the number of the replay to fill to; another one than `cell_in`.
            step: 1 if the replay to fill is the next one, else 0.
            ctas: grid size.
            stream: where to.
        """
        self.kernel(
            x,
            x_stride,
            out,
            out_stride,
            ledger_ptr,
            seed_key,
            reserved,
            rank,
            check_words,
            fill_words,
            cell_in,
            cell_out,
            step,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1)

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
        check_words: list[Int32],
        fill_words: list[Int32],
        cell_in: Int32,
        cell_out: Int32,
        step: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        first = cta * THREADS + thread
        stride = num_ctas * THREADS
        replay = ptx.ld_relaxed_gpu(ledger_ptr + Int64(cell_in) * WORD)
        next_replay = replay + Uint32(step)
        checked = Uint32(0)
        for gather in range_constexpr(oracle.GATHERS_PER_REPLAY):
            words = check_words[gather]
            checked += Uint32(words > 0)
            self.check(out + gather * out_stride, words, ledger_ptr, seed_key, reserved, gather, replay, first, stride)
            row_key = oracle.key(seed_key, Uint32(rank), Uint32(gather), next_replay, Uint32)
            self.fill(x + gather * x_stride, fill_words[gather], row_key, reserved, first, stride)
        if first == 0:
            ptx.st_relaxed_gpu(ledger_ptr + Int64(cell_out) * WORD, next_replay)
            ptx.red_add_relaxed_gpu(ledger_ptr + ledger.GATHERS * WORD, checked)

    @cute.jit
    def check(
        self,
        out: Int64,
        words: Int32,
        ledger_ptr: Int64,
        seed_key: Uint32,
        reserved: Uint32,
        gather: int,
        replay: Uint32,
        first: Int32,
        stride: Int32,
    ) -> None:
        """Compares this thread's words of every row; the rows' loads are in flight together."""
        ranks = range(self.world_size)
        row_bytes = Int64(words) * WORD
        keys = [oracle.key(seed_key, Uint32(r), Uint32(gather), replay, Uint32) for r in ranks]
        index = first
        while index < words:
            addr = out + Int64(index) * WORD
            seen = [ptx.ld_weak_b32(addr + r * row_bytes) for r in ranks]
            for r in range_constexpr(self.world_size):
                if seen[r] != oracle.payload(keys[r], Uint32(index), reserved, Uint32):
                    self.record(ledger_ptr, replay, gather, r, index, seen[r])
            index += stride

    @cute.jit
    def record(self, ledger_ptr: Int64, replay: Uint32, gather: int, src_rank: int, index: Int32, seen: Uint32) -> None:
        """Counts a wrong word; the first one leaves its place and its bits."""
        ptx.red_add_relaxed_gpu(ledger_ptr + ledger.BAD_WORDS * WORD, Uint32(1))
        if ptx.atom_cas_relaxed_gpu(ledger_ptr + ledger.LOCK * WORD, Uint32(0), Uint32(1)) == 0:
            fields = (replay, Uint32(gather), Uint32(src_rank), Uint32(index), seen)
            for i in range_constexpr(len(fields)):
                ptx.st_relaxed_gpu(ledger_ptr + (ledger.FIRST_REPLAY + i) * WORD, fields[i])

    @cute.jit
    def fill(self, x: Int64, words: Int32, row_key: Uint32, reserved: Uint32, first: Int32, stride: Int32) -> None:
        """Writes this thread's words of one input."""
        index = first
        while index < words:
            ptx.st_weak_b32(x + Int64(index) * WORD, oracle.payload(row_key, Uint32(index), reserved, Uint32))
            index += stride


class LateKernel:
    """One thread that sleeps for as long as the oracle says for the replay in a ledger cell."""

    @cute.jit
    def __call__(self, ledger_ptr: Int64, seed_key: Uint32, cell: Int32, stream: CUstream) -> None:
        """Launches it; `cell` holds the number of the replay to come."""
        self.kernel(ledger_ptr, seed_key, cell).launch(
            grid=(1, 1, 1), block=(1, 1, 1), stream=stream, preferred_smem_carveout=-1
        )

    @cute.kernel
    def kernel(self, ledger_ptr: Int64, seed_key: Uint32, cell: Int32) -> None:
        replay = ptx.ld_relaxed_gpu(ledger_ptr + Int64(cell) * WORD)
        begin = cute.arch.globaltimer()
        end = begin + Int64(oracle.late_ns(seed_key, replay, Uint32))
        while cute.arch.globaltimer() < end:
            pass


def num_ctas(words: int) -> int:
    """CTAs of a turn whose longest row has `words` words."""
    return min(MAX_CTAS, max(1, -(-words // THREADS)))


def compile_turn(world_size: int) -> CompiledKernel:
    """The turn kernel of a world size."""
    none = [Int32(0)] * oracle.GATHERS_PER_REPLAY
    return compile_kernel(
        TurnKernel(world_size),
        *(Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Uint32(0), Uint32(0), Int32(0)),
        none,
        none,
        *(Int32(0), Int32(1), Int32(0), Int32(1)),
        make_fake_stream(),
        key=(world_size,),
    )


def compile_late() -> CompiledKernel:
    """The kernel that is late."""
    return compile_kernel(LateKernel(), Int64(0), Uint32(0), Int32(0), make_fake_stream(), key=())
