# SPDX-License-Identifier: Apache-2.0
"""The floor of an all-gather in the virtual world: one kernel for all ranks that does the gather's loads, stores and
clears on the gather's footprint, and waits for nobody.

One launch instead of one per rank, so that the ranks stay together as they do in a gather: ranks that wait for nobody
drift apart, touch both slots at once, and fall out of the L2 cache (measured: 5 times slower at 4 MiB).
"""

from __future__ import annotations

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit, mailbox
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, EMPTY, MailboxLayout
from nvcomm.ptx import memory as ptx

THREADS = 256


class GatherFloorKernel:
    """Grid (ctas, ranks): a column of CTAs does what one rank's gather does."""

    def __init__(self, layout: MailboxLayout) -> None:
        self.layout = layout

    @cute.jit
    def __call__(
        self, ins: list[Int64], outs: list[Int64], boxes: list[Int64], num_chunks: Int32, ctas: Int32, stream: CUstream
    ) -> None:
        self.kernel(ins, outs, boxes, num_chunks).launch(
            grid=(ctas, len(boxes), 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=4,
            preferred_smem_carveout=-1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ins: list[Int64], outs: list[Int64], boxes: list[Int64], num_chunks: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, column, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for rank in range_constexpr(len(boxes)):
            if column == rank:
                self.work(ins[rank], outs[rank], boxes, rank, cta * THREADS + thread, ctas * THREADS, num_chunks)

    @cute.jit
    def work(
        self, inp: Int64, out: Int64, boxes: list[Int64], rank: int, first: Int32, step: Int32, num_chunks: Int32
    ) -> None:
        """Publishes all chunks of a rank, then collects, clears and writes out what is there."""
        row_bytes, ranks = self.layout.row_bytes, len(boxes)
        chunk = first
        while chunk < num_chunks:
            words = ptx.ld_weak_v4(inp + Int64(chunk) * CHUNK_BYTES)
            for i in range_constexpr(ranks):
                ptx.st_relaxed_sys_v4(boxes[(rank + i) % ranks] + rank * row_bytes + Int64(chunk) * CHUNK_BYTES, words)
            chunk += step
        chunk = first
        while chunk < num_chunks:
            addr = boxes[rank] + Int64(chunk) * CHUNK_BYTES
            rows = [ptx.ld_relaxed_sys_v4(addr + r * row_bytes) for r in range(ranks)]
            for r in range_constexpr(ranks):
                ptx.st_relaxed_sys_v4(addr + r * row_bytes, (Uint32(EMPTY),) * CHUNK_WORDS)
                ptx.st_weak_v4(out + (Int64(r) * Int64(num_chunks) + Int64(chunk)) * CHUNK_BYTES, rows[r])
            chunk += step


class GatherFloor:
    """Launches the floor on the current stream; `call()` can be captured."""

    def __init__(self, xs: list[torch.Tensor], outs: list[torch.Tensor], layout: MailboxLayout, ctas: int) -> None:
        ranks = len(xs)
        self._boxes = [torch.zeros(layout.slot_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        ints = [Int64(0)] * ranks
        self._kernel = jit.compile_kernel(
            GatherFloorKernel(layout), ints, ints, ints, Int32(1), Int32(1), make_fake_stream(), key=(layout,)
        )
        jit.preload(self._kernel)
        chunks = mailbox.num_chunks(xs[0].nbytes)
        self._args = (
            *([t.data_ptr() for t in tensors] for tensors in (xs, outs, self._boxes)),
            *(chunks, min(ctas, -(-chunks // THREADS))),
        )

    def call(self) -> None:
        self._kernel(*self._args, torch.cuda.current_stream().cuda_stream)
