# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: scores of a warp's columns over half of the dims, one function per kind of record.

Each fills tiles of 8 columns, 4 floats a lane in C order: heads on the rows, columns on the columns. The first tiles
are those that the other half's warp finishes, the last those that this warp finishes (`tile_row`).
The B fragments come from K with ldmatrix: an E4M3 row hands a lane 4 consecutive dims, which after conversion are
both registers of a k-step, so the k index of a step is a permutation of its dims; the query is stored in the same one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, range_constexpr

from decode.kv_cache import BF16
from decode.sparse_mla_layout import GRANULE, SparseMlaConfig
from decode.sparse_mla_query import fragment_address
from nvcomm.ptx import cluster, mma

QUADS = 4  # of k-steps in half of the dims: an ldmatrix of E4M3 rows serves 4 k-steps, one of BF16 rows 2


def tile_row(cfg: SparseMlaConfig, half: Int32, index: int) -> Int32:
    """First row of a tile in its group. Those that the other warp finishes come first, this warp's last.

    Half 0 finishes the first tiles. Of 5 it finishes the one in the middle too, which is number 2 for both warps.
    """
    own = cfg.tiles // 2
    upper = cfg.tiles - own
    if index < own:
        return ((1 - half) * upper + index) * 8
    if index >= upper:
        return (half * upper + index - upper) * 8
    return Int32(index * 8)


@cute.jit
def compute_scores(
    cfg: cutlass.Constexpr,
    base: Int32,
    query: list,
    row_scale: tuple,
    score_scale: Float32,
    group: Int32,
    half: Int32,
    lane: Int32,
    out: cute.Tensor,
) -> None:
    """Scores in units of log2 into 4 registers a tile.

    Args:
        cfg: compile-time facts.
        base: address of this CTA's shared memory.
        query: A fragments of the k-steps; empty for scaled records, which take them from shared memory.
        row_scale: `score_scale` over the query's scaling, for head lane/4 and head + 8.
        score_scale: factor of a score.
        group: of 32 columns.
        half: of the dims.
        lane: of the warp.
        out: registers.
    """
    rows = base + group * (cfg.group_columns * cfg.row_bytes)
    out.fill(0.0)
    if cutlass.const_expr(cfg.scaled):
        at = fragment_address(cfg, base, half, lane)
        scales = base + cfg.scales_at + (half * cfg.columns + group * 32) * 8
        scores_scaled(cfg, at, rows, scales, row_scale, score_scale, half, lane, out)
    elif cutlass.const_expr(cfg.layout == BF16):
        add_bf16(cfg, query, rows, half * 32, half, lane, out)
        scale_rows(cfg, row_scale, out)
    else:
        add_fp8(cfg, query, rows, half, lane, out)
        scale_rows(cfg, row_scale, out)


def scale_rows(cfg: SparseMlaConfig, row_scale: tuple[Float32, Float32], out: cute.Tensor) -> None:
    """Every score times the factor of its head."""
    for i in range(cfg.tiles * 4):
        out[i] = out[i] * row_scale[i % 4 // 2]


def add_fp8(cfg: SparseMlaConfig, query: list, rows: Int32, half: Int32, lane: Int32, sums: cute.Tensor) -> None:
    """Plain E4M3 records, F16 products."""
    for quad in range(QUADS):
        within = granules(cfg, half * 16 + quad * 4, lane)
        words = [
            mma.ldmatrix_x4(rows + tile_row(cfg, half, tile) * cfg.row_bytes + within) for tile in range(cfg.tiles)
        ]
        for step in range(4):
            for tile in range(cfg.tiles):
                fragment = mma.cvt_e4m3x4_f16x2(words[tile][step])
                multiply(mma.mma_m16n8k16_f16, query[quad * 4 + step], fragment, sums, tile)


def add_bf16(
    cfg: SparseMlaConfig, query: list, rows: Int32, granule: Int32, half: Int32, lane: Int32, sums: cute.Tensor
) -> None:
    """BF16 values from `granule` on, BF16 products; two k-steps for each ldmatrix."""
    for pair in range(len(query) // 2):
        within = granules(cfg, granule + pair * 4, lane)
        words = [
            mma.ldmatrix_x4(rows + tile_row(cfg, half, tile) * cfg.row_bytes + within) for tile in range(cfg.tiles)
        ]
        for step in range(2):
            for tile in range(cfg.tiles):
                fragment = words[tile][2 * step : 2 * step + 2]
                multiply(mma.mma_m16n8k16_bf16, query[pair * 2 + step], fragment, sums, tile)


@cute.jit
def scores_scaled(
    cfg: cutlass.Constexpr,
    query: Int32,
    rows: Int32,
    scales: Int32,
    row_scale: tuple,
    score_scale: Float32,
    half: Int32,
    lane: Int32,
    out: cute.Tensor,
) -> None:
    """Scaled E4M3 records: half 0 has scale groups 0 to 3, half 1 groups 4 to 6 and the BF16 part.

    The products of a group are summed in F16 x F16 -> F32, and the sum takes the scale of its column.
    """
    column_scales = [
        [cluster.ld_shared(scales + (tile_row(cfg, half, tile) + (lane % 4) * 2 + c) * 8 + half * 4) for c in range(2)]
        for tile in range(cfg.tiles)
    ]
    for group in cutlass.range(4 - half, unroll=1):
        fragments = [mma.ldmatrix_x4(query + group * 128 + step * 32) for step in range(4)]
        within = granules(cfg, half * 16 + group * 4, lane)
        sums = cute.make_rmem_tensor(cfg.tiles * 4, Float32)
        sums.fill(0.0)
        for tile in range_constexpr(cfg.tiles):
            words = mma.ldmatrix_x4(rows + tile_row(cfg, half, tile) * cfg.row_bytes + within)
            for step in range_constexpr(4):
                multiply(mma.mma_m16n8k16_f16, fragments[step], mma.cvt_e4m3x4_f16x2(words[step]), sums, tile)
            factors = [ue8m0_f32(word >> Uint32(8 * group)) for word in column_scales[tile]]
            for i in range_constexpr(4):
                out[tile * 4 + i] = out[tile * 4 + i] + sums[tile * 4 + i] * factors[i % 2]
    for i in range_constexpr(cfg.tiles * 4):
        out[i] = out[i] * row_scale[i % 4 // 2]
    if half == 1:
        rope = cute.make_rmem_tensor(cfg.tiles * 4, Float32)
        rope.fill(0.0)
        fragments = [mma.ldmatrix_x4(query + 3 * 128 + step * 32) for step in range(4)]
        add_bf16(cfg, fragments, rows, Int32(28), half, lane, rope)
        for i in range_constexpr(cfg.tiles * 4):
            out[i] = out[i] + rope[i] * score_scale


def multiply(product: object, a: tuple, b: tuple, sums: cute.Tensor, tile: int) -> None:
    """Adds a product to a tile."""
    for i, value in enumerate(product(a, b, [sums[tile * 4 + i] for i in range(4)])):
        sums[tile * 4 + i] = value


def granules(cfg: SparseMlaConfig, granule: Int32, lane: Int32) -> Int32:
    """Offset for ldmatrix: matrix i holds granule `granule` + i of 8 rows, the first of which is a multiple of 8."""
    row = lane % 8
    return row * cfg.row_bytes + cfg.swizzle(granule + lane // 8, row) * GRANULE


def ue8m0_f32(word: Uint32) -> Float32:
    """2 ** (lowest byte - 127); NaN for 255."""
    exponent = word & Uint32(0xFF)
    bits = exponent << Uint32(23)
    bits = cutlass.select_(exponent == Uint32(0), Uint32(0x00400000), bits)
    return mma.bits_f32(cutlass.select_(exponent == Uint32(255), Uint32(0x7FC00000), bits))
