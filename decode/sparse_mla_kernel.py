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
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from decode import sparse_mla_gather as gather
from decode import sparse_mla_merge as merge
from decode import sparse_mla_scores as scores
from decode import sparse_mla_values as values
from decode.kv_cache import BF16
from decode.sparse_mla_gather import Columns
from decode.sparse_mla_layout import COLUMNS, HEADS, THREADS, WARPS, SparseMlaConfig
from nvcomm.ptx import cluster, mma, shared


class SparseMlaKernel:
    """The kernel for one configuration."""

    def __init__(self, cfg: SparseMlaConfig) -> None:
        self.cfg = cfg

    @cute.jit
    def __call__(
        self,
        query: Int64,
        query_stride: Int64,
        out: Int64,
        lse: Int64,
        sink: Int64,
        window: list[Int64],
        window_ints: list[Int32],
        topk: list[Int64],
        topk_ints: list[Int32],
        window_chunks: Int32,
        heads: Int32,
        tokens: Int32,
        score_scale: Float32,
        out_scale: Float32,
        stream,  # noqa: ANN001
    ) -> None:
        """Launches. See `decode.sparse_mla` for the arguments; a column set is two lists, see `set_arguments`."""
        cfg = self.cfg
        self.kernel(
            query, query_stride, out, lse, sink, window, window_ints, topk, topk_ints, window_chunks, heads,
            score_scale, out_scale,
        ).launch(
            grid=(cfg.chunks, (heads + HEADS - 1) // HEADS, tokens),
            block=(THREADS, 1, 1),
            cluster=(cfg.chunks, 1, 1),
            smem=cfg.shared_bytes,
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=cfg.pdl,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        query: Int64,
        query_stride: Int64,
        out: Int64,
        lse: Int64,
        sink: Int64,
        window: list[Int64],
        window_ints: list[Int32],
        topk: list[Int64],
        topk_ints: list[Int32],
        window_chunks: Int32,
        heads: Int32,
        score_scale: Float32,
        out_scale: Float32,
    ) -> None:
        """Everything, for 16 heads of a token and 128 of its columns."""
        cfg = const_expr(self.cfg)
        thread, _, _ = cute.arch.thread_idx()
        rank, head_group, token = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        group, half = warp // 2, warp % 2
        base = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        if const_expr(cfg.chunks > 1):
            # Completed before the first push: nobody may write into a CTA that has not started.
            cute.arch.cluster_arrive_relaxed()
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        columns, chunk = select_columns(window, window_ints, topk, topk_ints, window_chunks, rank, token)
        slots = gather.load_slot(columns, chunk * COLUMNS + group * 32 + lane)
        first_head = Int64(token) * query_stride + Int64(head_group) * (HEADS * 512 * (1 if cfg.fp8_query else 2))
        if const_expr(cfg.fp8_query):
            words = gather.load_query_fp8(query + first_head, half, lane, cfg.few_heads)
        elif const_expr(cfg.scaled):
            words = gather.load_query_bf16(query + first_head, half, lane, cfg.few_heads, "scaled")
        elif const_expr(cfg.layout == BF16):
            words = gather.load_query_bf16(query + first_head, half, lane, cfg.few_heads, "bf16")
        else:
            words = gather.load_query_bf16(query + first_head, half, lane, cfg.few_heads, "fp8")

        # First the 16 columns whose scores go to the other half's warp, then those this warp keeps.
        away, kept = 16 * (1 - half), 16 * half
        if const_expr(cfg.scaled):
            gather.gather_scales(cfg, columns, slots, base, group, half, lane)
            if half == 1:
                gather.gather_tail(cfg, columns, slots, base, group, lane)
        gather.gather_rows(cfg, columns, slots, base, group, half, away, lane)
        gather.gather_rows(cfg, columns, slots, base, group, half, kept, lane)
        active = gather.is_active(slots)

        query_rows, undo = prepare_query(cfg, words, half)
        row_scale = (score_scale * undo[0], score_scale * undo[1])

        away_scores = cute.make_rmem_tensor(8, Float32)
        kept_scores = cute.make_rmem_tensor(8, Float32)
        mma.cp_async_wait_group(1)
        cute.arch.sync_warp()
        compute_scores(cfg, query_rows, row_scale, score_scale, base, group, half, away, lane, away_scores)
        for tile in range_constexpr(2):
            shared.st_shared_v4_f32(
                base + cfg.scratch_at + (warp * 2 + tile) * 512 + lane * 16,
                [away_scores[tile * 4 + i] for i in range(4)],
            )
        mma.cp_async_wait_group(0)
        cute.arch.sync_warp()
        compute_scores(cfg, query_rows, row_scale, score_scale, base, group, half, kept, lane, kept_scores)
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=64)
        for tile in range_constexpr(2):
            other = shared.ld_shared_v4_f32(base + cfg.scratch_at + ((warp ^ 1) * 2 + tile) * 512 + lane * 16)
            for i in range_constexpr(4):
                kept_scores[tile * 4 + i] = kept_scores[tile * 4 + i] + other[i]

        softmax(cfg, base, kept_scores, active >> Uint32(kept), warp, lane)

        units = cute.make_rmem_tensor(32, Float32)
        interleaved = compute_values(cfg, base, warp, lane, units)

        if const_expr(cfg.chunks > 1):
            cute.arch.cluster_wait()
            merge.push(cfg, base, units, rank, warp, lane)
        merge.push_stats(cfg, base, rank, thread)
        if const_expr(cfg.chunks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        finish(cfg, base, out, lse, sink, units, interleaved, out_scale, rank, head_group, token, heads, warp, lane)


@cute.jit
def select_columns(
    window: list,
    window_ints: list,
    topk: list,
    topk_ints: list,
    window_chunks: Int32,
    rank: Int32,
    token: Int32,
) -> tuple:
    """The column set that CTA `rank` reads, and the number of its chunk in that set."""
    from_window = rank < window_chunks
    addresses = [cutlass.select_(from_window, a, b) for a, b in zip(window, topk, strict=True)]
    ints = [cutlass.select_(from_window, a, b) for a, b in zip(window_ints, topk_ints, strict=True)]
    indices, indices_stride, length, pool, page_stride = addresses
    width, first, shift, num_slots = ints
    length = cutlass.select_(length == 0, length, length + Int64(token) * 4)
    columns = Columns(
        indices + Int64(token) * indices_stride, length, width, first, pool, page_stride, shift, num_slots
    )
    return columns, rank - cutlass.select_(from_window, Int32(0), window_chunks)


def prepare_query(cfg: SparseMlaConfig, words: list, half: Int32) -> tuple[list, tuple[Float32, Float32]]:
    """Fragments in the type of the products, and what undoes their scaling."""
    one = (Float32(1.0), Float32(1.0))
    if cfg.fp8_query:
        return gather.unpack_query_fp8(words), one
    if cfg.layout == BF16:
        return words, one
    converted, undo = gather.query_to_f16(words, cfg.few_heads)
    if cfg.scaled:
        for step in range(12, gather.QUERY_STEPS):
            converted[step] = [
                cutlass.select_(half == 0, f16, bf16) for f16, bf16 in zip(converted[step], words[step], strict=True)
            ]
    return converted, undo


def compute_scores(
    cfg: SparseMlaConfig,
    query: list,
    row_scale: tuple[Float32, Float32],
    score_scale: Float32,
    base: Int32,
    group: Int32,
    half: Int32,
    first: Int32,
    lane: Int32,
    out: cute.Tensor,
) -> None:
    """Scores of rows `first` .. + 15 of a group over half of the dims, in units of log2, 2 tiles of 4 floats."""
    rows = base + (group * 32 + first) * cfg.layout.data_bytes
    if cfg.scaled:
        scales = base + cfg.scales_at + (half * COLUMNS + group * 32 + first) * 8
        scores.scores_scaled(cfg, query, row_scale, score_scale, rows, scales, half, lane, out)
        return
    function = scores.scores_bf16 if cfg.layout == BF16 else scores.scores_fp8
    for tile, sums in enumerate(function(cfg, query, rows, half, lane)):
        for i in range(4):
            out[tile * 4 + i] = sums[i] * row_scale[i // 2]


@cute.jit
def softmax(cfg: cutlass.Constexpr, base: Int32, sums: cute.Tensor, active: Uint32, warp: Int32, lane: Int32) -> None:
    """Probabilities of this warp's 16 columns, relative to the CTA's maximum, into the scratch; l into its table.

    On return every warp's probabilities and sums are visible to the CTA, and so is all of K.
    """
    lowest = Float32(-float("inf"))
    for tile in range_constexpr(2):
        for i in range_constexpr(4):
            bit = active >> Uint32(tile * 8 + i % 2 + (lane % 4) * 2)
            sums[tile * 4 + i] = cutlass.select_((bit & Uint32(1)) != Uint32(0), sums[tile * 4 + i], lowest)
    for h in range_constexpr(2):
        best = cute.arch.fmax(
            cute.arch.fmax(sums[2 * h], sums[2 * h + 1]), cute.arch.fmax(sums[2 * h + 4], sums[2 * h + 5])
        )
        best = merge.quad_reduce(best, True)
        at = base + cfg.maxima_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, best, lane % 4 == 0)
    cute.arch.sync_threads()
    for h in range_constexpr(2):
        shift = merge.finite(merge.over_warps(base + cfg.maxima_at, lane // 4 + 8 * h, True))
        total = Float32(0.0)
        for tile in range_constexpr(2):
            for i in range_constexpr(2):
                value = mma.ex2(sums[tile * 4 + 2 * h + i] - shift)
                sums[tile * 4 + 2 * h + i] = value
                total = total + value
        total = merge.quad_reduce(total, False)
        at = base + cfg.sums_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, total, lane % 4 == 0)
    # F16 holds a probability to 11 bits; the other records need BF16's range for their values.
    pack = const_expr(mma.cvt_rn_bf16x2 if cfg.scaled or cfg.layout == BF16 else mma.cvt_rn_f16x2)
    fragment = [pack(sums[2 * i], sums[2 * i + 1]) for i in range(4)]
    cluster.st_shared_v4(base + cfg.scratch_at + (warp * 32 + lane) * 16, fragment)
    cute.arch.sync_threads()


@cute.jit
def compute_values(
    cfg: cutlass.Constexpr, base: Int32, warp: Int32, lane: Int32, units: cute.Tensor
) -> cutlass.Boolean:
    """Partial outputs of this warp's 64 dims into 32 registers; returns whether a lane's dims are interleaved."""
    scratch = base + cfg.scratch_at
    interleaved = warp < 0
    if const_expr(cfg.scaled):
        if warp < 7:
            put_units(units, values.values_scaled(cfg, base, base + cfg.scales_at, scratch, warp, lane))
        else:
            put_units(units, values.values_bf16(cfg, base, scratch, Int32(28), lane))
        interleaved = warp == 7
    elif const_expr(cfg.layout == BF16):
        put_units(units, values.values_bf16(cfg, base, scratch, warp * 8, lane))
        interleaved = warp >= 0
    else:
        put_units(units, values.values_fp8(cfg, base, scratch, warp, lane))
    return interleaved


def put_units(units: cute.Tensor, computed: list[list[Float32]]) -> None:
    """Into registers that survive a branch."""
    for i, unit in enumerate(computed):
        for j in range(4):
            units[i * 4 + j] = unit[j]


@cute.jit
def finish(
    cfg: cutlass.Constexpr,
    base: Int32,
    out: Int64,
    lse: Int64,
    sink: Int64,
    units: cute.Tensor,
    interleaved: cutlass.Boolean,
    out_scale: Float32,
    rank: Int32,
    head_group: Int32,
    token: Int32,
    heads: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Merges and stores this CTA's share of the output, and CTA 0 the LSE."""
    first_head = Int64(token) * Int64(heads) + Int64(head_group * HEADS)
    for h in range_constexpr(1 if cfg.few_heads else 2):
        head = lane // 4 + 8 * h
        sink_log2 = None
        if const_expr(cfg.sink):
            bits = cute.arch.inline_ptx(
                "ld.global.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[sink + Int64(head_group * HEADS + head) * 4],
            )
            sink_log2 = bits * Float32(merge.LOG2_E)
        factors, maximum, total = merge.head_weights(cfg, base, head, sink_log2)
        cute.arch.inline_ptx(
            "st.global.f32 [{$r0}], {$r1};",
            read_only_args=[lse + (first_head + Int64(head)) * 4, merge.natural_lse(maximum, total)],
            predicate=(rank == 0) & (warp == 0) & (lane % 4 == 0),
        )
        factors = [factor * out_scale for factor in factors]
        for c in range_constexpr(4):
            unit = warp * 8 + 2 * c + h
            owns = unit % cfg.chunks == rank
            own = [units[(2 * c + h) * 4 + j] for j in range(4)]
            result = merge.merged_unit(cfg, base, own, factors, rank, unit, lane)
            merge.store_unit(out + first_head * 1024, 2 * c + h, result, owns, warp, lane, interleaved)


def set_arguments() -> tuple[list[Int64], list[Int32]]:
    """Placeholders of a set: indices, their stride in bytes, length, pool, page stride; width, first, shift, slots."""
    return [Int64(0)] * 5, [Int32(0)] * 4


def fake_arguments() -> tuple:
    """What to compile the kernel with, without the stream."""
    addresses, ints = set_arguments()
    return (
        *(Int64(0),) * 5, addresses, ints, *set_arguments(), Int32(1), Int32(HEADS), Int32(1),
        Float32(1.0), Float32(1.0),
    )  # fmt: skip
