# SPDX-License-Identifier: Apache-2.0
"""The floor under sparse MLA decode: a kernel that gathers the same records and does nothing with them."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

ROW_BYTES = 512
ROWS_PER_WARP = 16


class GatherFloorKernel:
    """A cluster for each token, a CTA of 256 threads for each 128 columns: indices, rows, then two cluster barriers."""

    def __init__(self, chunks: int, pdl: bool) -> None:
        self.chunks = chunks
        self.pdl = pdl

    @cute.jit
    def __call__(self, indices: Int64, stride: Int64, pool: Int64, sink: Int64, tokens: Int32, stream) -> None:  # noqa: ANN001
        """Launches; `stride`: bytes between the lists of two tokens; `sink`: somewhere to store what never happens."""
        self.kernel(indices, stride, pool, sink).launch(
            grid=(self.chunks, tokens, 1),
            block=(256, 1, 1),
            cluster=(self.chunks, 1, 1),
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, indices: Int64, stride: Int64, pool: Int64, sink: Int64) -> None:
        """One row of 512 bytes per warp and load, 16 of them in flight."""
        thread, _, _ = cute.arch.thread_idx()
        rank, token, _ = cute.arch.block_idx()
        lane = thread % 32
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()
        at = (
            indices
            + Int64(token) * stride
            + Int64(rank * 128 + thread // 32 * ROWS_PER_WARP + lane % ROWS_PER_WARP) * 4
        )
        slot = cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at])
        words = Uint32(0)
        for i in range_constexpr(ROWS_PER_WARP):
            row = pool + Int64(cute.arch.shuffle_sync(slot, i)) * ROW_BYTES + Int64(lane) * 16
            a, b, c, d = cute.arch.inline_ptx(
                "ld.global.cg.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[row],
            )
            words = words ^ a ^ b ^ c ^ d
        cute.arch.cluster_wait()
        if words == Uint32(0x1234567):
            cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[sink, words])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def fake_arguments() -> tuple[Int64, Int64, Int64, Int64, Int32]:
    """What to compile the kernel with, without the stream."""
    return Int64(0), Int64(0), Int64(0), Int64(0), Int32(1)
