# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode in one kernel: a cluster for each token and 16 heads, a CTA for each 128 columns of its list.

A CTA gathers its 128 records once, as keys and values, all copies in flight together, then

    scores   warp (group, half): 32 columns x half of the dims; the two halves meet in shared memory, 16 columns each
    softmax  one table of maxima, one of sums; P goes to shared memory as A fragments
    values   warp w: dims 64 w .. of all 128 columns
    merge    partial outputs travel over distributed shared memory to the CTA that finishes them

Order (PDL): everything that an earlier kernel may have written is read behind `griddepcontrol.wait`. The trigger right
behind it publishes nothing; the next kernel's own wait covers this one's stores.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from decode import sparse_mla_gather as gather
from decode import sparse_mla_merge as merge
from decode import sparse_mla_query as queries
from decode import sparse_mla_scores as scores
from decode import sparse_mla_softmax as softmax
from decode import sparse_mla_values as values
from decode.sparse_mla_layout import COLUMNS, HEADS, THREADS, SparseMlaConfig
from decode.sparse_mla_work import ColumnLists, Number, Work
from nvcomm.ptx import mma, shared


class SparseMlaKernel:
    """The kernel for one configuration."""

    def __init__(self, cfg: SparseMlaConfig) -> None:
        self.cfg = cfg

    @cute.jit
    def __call__(self, work: Work, tokens: Int32, stream: CUstream) -> None:
        """Launches."""
        cfg = self.cfg
        self.kernel(work.numbers()).launch(
            grid=(cfg.chunks, (work.heads + HEADS - 1) // HEADS, tokens),
            block=(THREADS, 1, 1),
            cluster=(cfg.chunks, 1, 1),
            smem=cfg.shared_bytes,
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=cfg.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, numbers: list[Number]) -> None:
        """Everything, for 16 heads of a token and as many of its columns as a CTA takes."""
        cfg, work = const_expr(self.cfg), Work.of(numbers)
        thread, _, _ = cute.arch.thread_idx()
        rank, head_group, token = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        group, half = warp // 2, warp % 2
        base = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        # Of 128 columns all come from one set; of 160 each lane looks for itself.
        position = rank * cfg.columns
        if const_expr(cfg.columns > COLUMNS):
            position = position + group * cfg.group_columns + lane
        columns, column = gather.select_columns(work, position, token)
        first_head = Int64(token) * work.query_stride + Int64(head_group) * (HEADS * 512 * (1 if cfg.fp8_query else 2))
        rows = base + group * (cfg.group_columns * cfg.row_bytes)
        if const_expr(cfg.chunks > 1):
            merge.open_inbox(cfg, base, rank, thread)
            if const_expr(not cfg.tight):
                cute.arch.cluster_arrive_relaxed()
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        if const_expr(cfg.columns == COLUMNS):
            column = column + group * 32 + lane
        slot = gather.load_slot(columns, column)
        if const_expr(cfg.columns > COLUMNS):
            more_columns, column = gather.select_columns(work, position + 32, token)
            more_slots = gather.load_slot(more_columns, column, lane < cfg.group_columns - 32)
        pieces = queries.load_query(cfg, work.query + first_head, thread)
        if const_expr(cfg.sink):
            sink_value = queries.load_sink(cfg, work.sink + Int64(head_group) * (HEADS * 4), thread)
        address = gather.record_address(cfg, columns, slot)
        low, high = gather.is_active(slot), Uint32(0)
        if const_expr(cfg.scaled):
            gather.gather_scales(cfg, columns, slot, base, group, half, lane)
            if half == 1:
                gather.gather_tail(cfg, address, low, rows, lane)
        # A loop that stays one: the assembler moves nothing that waits for the query in front of the copies.
        for first in cutlass.range(0, 32, 16, unroll=1):
            gather.gather_rows(cfg, address, low, rows, half, first, 16, lane)
        if const_expr(cfg.columns > COLUMNS):
            high = gather.is_active(more_slots)
            address = gather.record_address(cfg, more_columns, more_slots)
            gather.gather_rows(cfg, address, high, rows + 32 * cfg.row_bytes, half, 0, 8, lane)
        mma.cp_async_commit_group()

        queries.store_query(cfg, pieces, base, thread)
        if const_expr(cfg.sink):
            queries.store_sink(cfg, sink_value, base, thread)
        cute.arch.sync_threads()
        undo = queries.query_undo(cfg, base, lane)
        row_scale = (work.score_scale * undo[0], work.score_scale * undo[1])
        fragments = [] if cfg.scaled else queries.query_fragments(cfg, base, half, lane)

        sums = cute.make_rmem_tensor(cfg.tiles * 4, Float32)
        mma.cp_async_wait_group(0)
        cute.arch.sync_warp()
        scores.compute_scores(cfg, base, fragments, row_scale, work.score_scale, group, half, lane, sums)
        if const_expr(cfg.chunks > 1 and cfg.tight):
            # Only now: the query lay where the inbox is, and every value of it has been used.
            cute.arch.cluster_arrive_relaxed()
        mine = exchange(cfg, base, sums, group, warp, lane)
        softmax.put_maxima(cfg, base, mine, gather.kept_columns(cfg, low, high, half), warp, lane)
        early = values.early_values(cfg, base, warp, lane)
        softmax.put_weights(cfg, base, mine, warp, lane)
        if const_expr(cfg.chunks > 1):
            cute.arch.cluster_wait()
        merge.push_stats(cfg, base, rank, warp, lane)

        units = cute.make_rmem_tensor(32, Float32)
        values.compute_values(cfg, base, early, warp, lane, units)
        row = Int64(token) * Int64(work.heads) + Int64(head_group * HEADS)
        if const_expr(cfg.chunks > 1):
            merge.push(cfg, base, units, rank, warp, lane)
            merge.finish(cfg, base, work.out + row * 1024, work.lse + row * 4, work.out_scale, rank, warp, lane)
        else:
            cute.arch.sync_threads()
            merge.finish_alone(cfg, base, work.out + row * 1024, work.lse + row * 4, work.out_scale, units, warp, lane)


@cute.jit
def exchange(
    cfg: cutlass.Constexpr, base: Int32, sums: cute.Tensor, group: Int32, warp: Int32, lane: Int32
) -> cute.Tensor:
    """The two warps of a group add up their halves of the dims: each gets whole scores for the tiles that it finishes.

    Returns 4 registers a tile, in the order of `softmax.kept_tile`.
    """
    at = base + cfg.scratch_at + warp * (cfg.kept_tiles * 512) + lane * 16
    for tile in range_constexpr(cfg.kept_tiles):
        shared.st_shared_v4_f32(at + tile * 512, [sums[tile * 4 + i] for i in range(4)])
    cute.arch.barrier(barrier_id=group + 1, number_of_threads=64)
    at = base + cfg.scratch_at + (warp ^ 1) * (cfg.kept_tiles * 512) + lane * 16
    mine = cute.make_rmem_tensor(cfg.kept_tiles * 4, Float32)
    for tile in range_constexpr(cfg.kept_tiles):
        other = shared.ld_shared_v4_f32(at + tile * 512)
        # The tile in the middle of 5 is the same one for both warps.
        kept = cfg.kept_tiles + tile if tile < cfg.tiles // 2 else tile
        for i in range_constexpr(4):
            mine[tile * 4 + i] = sums[kept * 4 + i] + other[i]
    return mine


def fake_arguments() -> tuple[Work, Int32]:
    """What to compile the kernel with, without the stream."""
    lists = ColumnLists._make([*[Int64(0)] * 5, *[Int32(0)] * 4])
    scalars = [Int32(1), Int32(HEADS), Float32(1.0), Float32(1.0)]
    return Work._make([*[Int64(0)] * 5, lists, lists, *scalars]), Int32(1)
