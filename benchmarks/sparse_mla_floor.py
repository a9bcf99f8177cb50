# SPDX-License-Identifier: Apache-2.0
"""The floor under sparse MLA decode: a kernel that gathers the same records and does nothing with them."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from decode.kv_cache import RecordLayout

GRANULE = 16  # bytes of a load
ROWS_PER_WARP = 16


class GatherFloorKernel:
    """A cluster for each token, a CTA of 256 threads for each 128 columns: indices, rows, then two cluster barriers."""

    def __init__(self, layout: RecordLayout, chunks: int, pdl: bool) -> None:
        self.layout = layout
        self.chunks = chunks
        self.pdl = pdl

    @cute.jit
    def __call__(
        self,
        indices: Int64,
        stride: Int64,
        pool: Int64,
        page_stride: Int64,
        shift: Int32,
        sink: Int64,
        tokens: Int32,
        stream,  # noqa: ANN001
    ) -> None:
        """Launches.

        Args:
            indices: address of the lists.
            stride: bytes between the lists of two tokens.
            pool: address of the pool.
            page_stride: bytes between two pages.
            shift: log2 of the records to a page.
            sink: somewhere to store what never happens.
            tokens: number of lists.
            stream: to launch on.
        """
        self.kernel(indices, stride, pool, page_stride, shift, sink).launch(
            grid=(self.chunks, tokens, 1),
            block=(256, 1, 1),
            cluster=(self.chunks, 1, 1),
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, indices: Int64, stride: Int64, pool: Int64, page_stride: Int64, shift: Int32, sink: Int64) -> None:
        """A warp loads 16 records at once: 16 bytes a lane and load, and 8 bytes of scales if there are any."""
        layout = const_expr(self.layout)
        thread, _, _ = cute.arch.thread_idx()
        rank, token, _ = cute.arch.block_idx()
        lane = thread % 32
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()
        column = rank * 128 + thread // 32 * ROWS_PER_WARP + lane % ROWS_PER_WARP
        slot = cute.arch.inline_ptx(
            "ld.global.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[indices + Int64(token) * stride + Int64(column) * 4],
        )
        block = Int32(1) << shift
        page, offset = pool + Int64(slot >> shift) * page_stride, slot & (block - 1)
        record = page + Int64(offset) * layout.data_bytes
        words = Uint32(0)
        granules = layout.data_bytes // GRANULE
        for i in range_constexpr(ROWS_PER_WARP * granules // 32):
            granule = i * 32 + lane
            row = cute.arch.shuffle_sync(record, granule // granules)
            a, b, c, d = cute.arch.inline_ptx(
                "ld.global.cg.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[row + Int64(granule % granules * GRANULE)],
            )
            words = words ^ a ^ b ^ c ^ d
        if const_expr(layout.scale_bytes > 0):
            a, b = cute.arch.inline_ptx(
                "ld.global.cg.v2.b32 {{$w0},{$w1}}, [{$r0}];",
                write_only_types=[Uint32] * 2,
                read_only_args=[page + Int64(block * layout.data_bytes + offset * layout.scale_bytes)],
            )
            words = words ^ a ^ b
        cute.arch.cluster_wait()
        if words == Uint32(0x1234567):
            cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[sink, words])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def fake_arguments() -> tuple[Int64, Int64, Int64, Int64, Int32, Int64, Int32]:
    """What to compile the kernel with, without the stream."""
    return Int64(0), Int64(0), Int64(0), Int64(0), Int32(1), Int64(0), Int32(1)
