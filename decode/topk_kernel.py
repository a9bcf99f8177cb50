# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of BF16 rows, one kernel: a cluster of CTAs a row, the row read from memory once.

1. Each CTA streams its share and keeps maxima: one a vector, one a group of elements. Its threshold is about the
   ceil(k / CTAs)-th largest of its group maxima. Groups are disjoint, so at least k elements of the row reach the
   smallest of the CTAs' thresholds, whatever the data; with random data hardly more than k do.
2. One exchange agrees on that threshold. Vectors whose maximum reaches it are read again and held in registers; their
   elements that reach it are candidates, and counted by key. More vectors than lanes are listed instead.
3. A second exchange gives every CTA everybody's counts: it finds the k-th key, and where its own winners belong.

Only when some CTA has more candidates than fit (data whose top crowds into few groups) the row is counted again
without lists (`topk_ordered`). The branch is taken on the device by all CTAs of a row alike.

Memory order: remote accesses to shared memory come after the first cluster barrier (all CTAs have started and cleared
theirs). Both exchanges are asynchronous stores counted by an mbarrier of their destination, which waits for them
before it exits. A cluster barrier there would drop L1, and with it the batches to be read again.
Logits and lengths are read, and `out` is written, only after griddepcontrol.wait.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, const_expr

from decode.topk_config import BLOCK_COLUMNS, PDL_BYTES, VECTOR_BYTES, VECTOR_COLUMNS, WARP, SharedLayout, TopkConfig
from decode.topk_exchange import prepare
from decode.topk_row import Row, first_vector, ld_vector_below
from decode.topk_select import NUM_STAMPS, fill, select, stamp, take_all
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory


class TopkKernel:
    """The top-k of one `TopkConfig`."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config
        self.layout = SharedLayout(config)

    @cute.jit
    def __call__(
        self,
        logits: Int64,
        lengths: Int64,
        out: Int64,
        row_bytes: Int64,
        out_row_bytes: Int64,
        num_rows: Int32,
        num_columns: Int32,
        rows_per_length: Int32,
        stream: CUstream,
    ) -> None:
        """Launches the kernel.

        Args:
            logits: address of (num_rows, num_columns) bf16, rows `row_bytes` apart, all multiples of 16.
            lengths: address of int32, one for each `rows_per_length` rows.
            out: address of (num_rows, k) int32, rows `out_row_bytes` apart.
            row_bytes, out_row_bytes: strides.
            num_rows, num_columns: extents; a length beyond the columns means all of them.
            rows_per_length: rows that share a length; in column mode 1.
            stream: CUDA stream.
        """
        cluster = self.config.cluster
        short_columns = Int32(PDL_BYTES // 2) // num_rows
        self.kernel(logits, lengths, out, row_bytes, out_row_bytes, num_columns, rows_per_length, short_columns).launch(
            grid=(num_rows * cluster, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            smem=self.layout.total_bytes,
            stream=stream,
            min_blocks_per_mp=max(1, 1024 // self.config.threads),
            preferred_smem_carveout=-1,  # the driver's default; left out, the compiler asks the driver for a GPU
            use_pdl=self.config.pdl != "off",
        )

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        lengths: Int64,
        out: Int64,
        row_bytes: Int64,
        out_row_bytes: Int64,
        num_columns: Int32,
        rows_per_length: Int32,
        short_columns: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # From a shuffle, so that it stays in a register: else the CTA's rank is read, slowly, at every use.
        smem = ptx.shfl_idx(ptx.shared_base(), Uint32(0))
        stamps = cute.make_rmem_tensor((NUM_STAMPS,), Uint32)
        stamp(config, stamps, 0)
        prepare(config, smem, thread)
        if const_expr(config.cluster > 1):
            ptx.cluster_wait_acquire()
        else:
            cute.arch.sync_threads()
        if const_expr(config.pdl != "off"):
            cute.arch.griddepcontrol_wait()
        if const_expr(config.pdl == "always"):
            # Every reader of `out` waits for this grid's end; the trigger only lets the next grid get ready.
            cute.arch.griddepcontrol_launch_dependents()
        stamp(config, stamps, 1)
        row_index = block // config.cluster
        cta = block % config.cluster
        data = logits + Int64(row_index) * row_bytes
        # The first vector does not wait for the length: it is in the buffer, whether it counts or not.
        vector = first_vector(config, cta, thread)
        first = ld_vector_below(data + Int64(vector) * VECTOR_BYTES, vector, num_columns // VECTOR_COLUMNS)
        length_index = row_index
        if const_expr(config.mode == "blocks"):
            length_index = row_index // rows_per_length
        length = Int32(memory.ld_weak_b32(lengths + Int64(length_index) * 4))
        stamp(config, stamps, 2)
        if length > num_columns:
            length = num_columns
        if length < 0:
            length = Int32(0)
        if const_expr(config.pdl == "short"):  # noqa: SIM102
            if length <= short_columns:
                cute.arch.griddepcontrol_launch_dependents()
        out_row = out + Int64(row_index) * out_row_bytes
        lane = thread % WARP
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if const_expr(config.mode == "columns"):
            row = Row(
                config, self.layout, smem, thread, lane, warp, cta, data, out_row,
                length // VECTOR_COLUMNS, length % VECTOR_COLUMNS, Uint32(config.k),
            )  # fmt: skip
            if length <= config.k:
                take_all(row, length)
            else:
                select(row, first, stamps)
        else:
            num_blocks = (length + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
            num_select = num_blocks - 1
            if num_select > config.k - 1:
                num_select = Int32(config.k - 1)
            # The newest block is pinned: it takes the first place, and the others compete for the rest.
            row = Row(
                config, self.layout, smem, thread, lane, warp, cta, data, out_row + 4,
                num_blocks - 1, Int32(0), Uint32(num_select),
            )  # fmt: skip
            if (cta == 0) & (thread == 0):
                memory.st_weak_b32(out_row, Uint32(num_blocks - 1))
            if num_blocks <= 1:
                fill(row, Uint32(0))
            else:
                select(row, first, stamps)
