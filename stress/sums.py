# SPDX-License-Identifier: Apache-2.0
"""The stress of reductions: each gather of a replay is followed by a sum, whose every value is checked on the device.

Numbers come from the gather's own payload: the low 5 bits of each half word, as bf16. Their sum over at most 8 ranks is
a whole number below 256, exact in bf16 in any order, so what a rank has to find follows from the rows that it gathered,
and those the turn compares with the oracle word by word. Sums are formed by LL, by two-shot and by reduce-scatter, by
the size of the gather; gathers and sums of all sizes share one mailbox with nothing between them.
"""

from __future__ import annotations

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm.jit import CompiledKernel, compile_kernel
from nvcomm.ptx import memory as ptx
from nvcomm.ptx import mma
from stress import ledger
from stress.device_oracle import THREADS, WORD, num_ctas
from stress.gpu_rank import Gatherer, GpuRank
from stress.plan import Plan

HALF = 0x1F001F  # the bits of a word that make its two numbers
WAYS = ("ll", "two_shot", "scatter")


class NumbersKernel:
    """Makes the numbers of a rank's payload, or compares sums with those of the rows it gathered.

    Args:
        rows: how many rows are added: 1 to make numbers, the number of ranks to compare.
        compare: whether to compare with what lies there, or to write.
    """

    def __init__(self, rows: int, compare: bool) -> None:  # noqa: FBT001 - static configuration of a kernel
        self.rows = rows
        self.compare = compare

    @cute.jit
    def __call__(
        self,
        payload: Int64,
        numbers: Int64,
        words: Int32,
        start: Int32,
        stop: Int32,
        ledger_ptr: Int64,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches it.

        Args:
            payload: `rows` rows of `words` words.
            numbers: bf16, those of words `start` to `stop - 1` alone.
            words: of a row.
            start, stop: which of them.
            ledger_ptr: the rank's ledger.
            ctas: grid size.
            stream: where to.
        """
        self.kernel(payload, numbers, words, start, stop, ledger_ptr).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1
        )

    @cute.kernel
    def kernel(
        self, payload: Int64, numbers: Int64, words: Int32, start: Int32, stop: Int32, ledger_ptr: Int64
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        index = start + cta * THREADS + thread
        while index < stop:
            total = Uint32(0)
            for r in range_constexpr(self.rows):
                total += ptx.ld_weak_b32(payload + Int64(r * words + index) * WORD) & Uint32(HALF)
            low, high = Int32(total & Uint32(0xFFFF)), Int32(total >> Uint32(16))
            pair = mma.cvt_rn_bf16x2(Float32(low), Float32(high))
            addr = numbers + Int64(index - start) * WORD
            if const_expr(self.compare):  # noqa: SIM102 - decided while the kernel is traced
                if ptx.ld_weak_b32(addr) != pair:
                    ptx.red_add_relaxed_gpu(ledger_ptr + ledger.BAD_WORDS * WORD, Uint32(1))
            else:
                ptx.st_weak_b32(addr, pair)
            index += num_ctas * THREADS


def compile_numbers(rows: int, *, compare: bool) -> CompiledKernel:
    """The kernel of one configuration."""
    return compile_kernel(
        NumbersKernel(rows, compare),
        *(Int64(0), Int64(0), Int32(1), Int32(0), Int32(1), Int64(0), Int32(1)),
        make_fake_stream(),
        key=(rows, compare),
    )


class SumRank(GpuRank):
    """A rank whose gathers are each followed by a sum."""

    def __init__(self, comm: Gatherer, plan: Plan, device: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(comm, plan, device, stream)
        self._numbers = torch.zeros(2 * self._x_words, dtype=torch.bfloat16, device=device)
        self._sums = torch.zeros_like(self._numbers)
        self._make = compile_numbers(1, compare=False)
        self._compare = compile_numbers(comm.world_size, compare=True)

    def load(self) -> None:
        """Loads the collectives' kernels and the checks', too."""
        for op in ("all_reduce", "reduce_scatter"):
            self.comm.prepare(op, torch.bfloat16)
        for kernel in (self._make, self._compare):
            kernel(*self._nothing(), self.stream.cuda_stream)
        super().load()

    def _nothing(self) -> tuple[int, ...]:
        return self.x.data_ptr(), self._numbers.data_ptr(), 1, 0, 0, self.ledger.data_ptr(), 1

    def _gather(self, gather: int, words: int) -> None:
        way = WAYS[(gather + words) % len(WAYS)]
        stream, ledger_ptr, ctas = self.stream.cuda_stream, self.ledger.data_ptr(), num_ctas(words)
        self._make(self.x[gather].data_ptr(), self._numbers.data_ptr(), words, 0, words, ledger_ptr, ctas, stream)
        super()._gather(gather, words)
        start, stop = self._sum(way, words)
        gathered, sums = self.out[gather].data_ptr(), self._sums.data_ptr()
        if stop > start:
            self._compare(gathered, sums, words, start, stop, ledger_ptr, num_ctas(stop - start), stream)

    def _sum(self, way: str, words: int) -> tuple[int, int]:
        """Sums, and says of which words."""
        mine = self._numbers[: 2 * words].view(words, 2)
        if way != "scatter":
            self.comm.all_reduce(mine, self._sums[: 2 * words].view(words, 2), protocol=way)
            return 0, words
        each, more = divmod(words, self.comm.world_size)
        rank = self.comm.rank
        start = rank * each + min(rank, more)
        stop = start + each + (rank < more)
        self.comm.reduce_scatter(mine, self._sums[: 2 * (stop - start)].view(-1, 2))
        return start, stop
