# SPDX-License-Identifier: Apache-2.0
"""The floor of top-k: read every row once, with the loads of the real kernel and two cluster barriers, and no more."""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, range_constexpr

from decode.topk_config import UNROLL, VECTOR_BYTES, WARP, SharedLayout, TopkConfig
from decode.topk_exchange import cluster_sync
from decode.topk_row import Row, vector_address, vector_at
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory


class FloorKernel:
    """Reads rows of `columns` columns with clusters of `config.cluster` CTAs and XORs what it reads."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, logits: Int64, out: Int64, row_bytes: Int64, num_rows: Int32, num_columns: Int32, stream: CUstream
    ) -> None:
        """Launches; `out` takes a word per thread."""
        cluster = self.config.cluster
        self.kernel(logits, out, row_bytes, num_columns).launch(
            grid=(num_rows * cluster, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=-1,
            use_pdl=False,
        )

    @cute.kernel
    def kernel(self, logits: Int64, out: Int64, row_bytes: Int64, num_columns: Int32) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = Row(
            config, SharedLayout(config), Uint32(0), thread, thread % WARP, thread // WARP, block % config.cluster,
            logits + Int64(block // config.cluster) * row_bytes, out, num_columns // 8, Int32(0), Uint32(0),
        )  # fmt: skip
        mixed = Uint32(0)
        batch_vectors = config.step_vectors * UNROLL
        for batch in range((row.num_vectors + batch_vectors - 1) // batch_vectors):
            vector = vector_at(row, batch, Int32(0), thread)
            addr = vector_address(row, vector)
            if vector + (UNROLL - 1) * config.step_vectors < row.num_vectors:
                quads = [memory.ld_weak_v4(addr + Int64(u * config.step_vectors * VECTOR_BYTES)) for u in range(UNROLL)]
                for quad in quads:
                    mixed = mixed ^ quad[0] ^ quad[1] ^ quad[2] ^ quad[3]
            else:
                for u in range_constexpr(UNROLL):
                    if vector + u * config.step_vectors < row.num_vectors:
                        a, b, c, d = memory.ld_weak_v4(addr + Int64(u * config.step_vectors * VECTOR_BYTES))
                        mixed = mixed ^ a ^ b ^ c ^ d
        cluster_sync(row)
        cluster_sync(row)
        mixed = ptx.redux_max(mixed)
        if row.lane == 0:
            memory.st_weak_b32(out + Int64(block * config.warps + row.warp) * 4, mixed)
