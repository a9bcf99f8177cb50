# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: scores of 16 columns for half of the dims, one function per kind of record.

Each returns two tiles of 8 columns, 4 floats a lane in C order: heads on the rows, columns on the columns.
The B fragments come from K with ldmatrix: an E4M3 row hands a lane 4 consecutive dims, which after conversion are
both registers of a k-step, so the k index of a step is a permutation of its dims; the query is loaded in the same one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from decode.sparse_mla_layout import GRANULE, SparseMlaConfig
from nvcomm.ptx import cluster, mma

TILES = 2
Tile = list[Float32]
Fragments = list[list[Uint32]]


def zero_tile() -> Tile:
    """An accumulator."""
    return [Float32(0.0)] * 4


def granules_of_rows(cfg: SparseMlaConfig, rows: Int32, granule: Int32, lane: Int32) -> Int32:
    """Address for ldmatrix: matrix i holds granule `granule` + i of 8 rows, the first of them at address `rows`."""
    row = lane % 8
    return rows + row * cfg.layout.data_bytes + cfg.swizzle(granule + lane // 8, row) * GRANULE


def scores_fp8(cfg: SparseMlaConfig, query: Fragments, rows: Int32, half: Int32, lane: Int32) -> list[Tile]:
    """Plain E4M3 records. `rows`: address of the first of 16 rows of K. Query: F16."""
    # Two accumulators a tile: a chain of 16 dependent products would wait for each one's latency.
    sums = [[zero_tile(), zero_tile()] for _ in range(TILES)]
    for quad in range(4):
        for tile in range(TILES):
            at = granules_of_rows(cfg, rows + tile * 8 * cfg.layout.data_bytes, half * 16 + quad * 4, lane)
            for i, word in enumerate(mma.ldmatrix_x4(at)):
                fragment = mma.cvt_e4m3x4_f16x2(word)
                sums[tile][i % 2] = mma.mma_m16n8k16_f16(query[quad * 4 + i], fragment, sums[tile][i % 2])
    return [_add(*pair) for pair in sums]


def scores_bf16(cfg: SparseMlaConfig, query: Fragments, rows: Int32, half: Int32, lane: Int32) -> list[Tile]:
    """BF16 records. Query: BF16."""
    return _scores_bf16(cfg, query, rows, half * 32, lane)


@cute.jit
def scores_scaled(
    cfg: cutlass.Constexpr,
    query: list,
    row_scale: tuple,
    score_scale: Float32,
    rows: Int32,
    scales: Int32,
    half: Int32,
    lane: Int32,
    out: cute.Tensor,
) -> None:
    """Scaled E4M3 records with a BF16 part, 16 columns x 2 tiles into `out` (8 floats).

    Args:
        cfg: compile-time facts.
        query: F16 fragments, scaled for each head; those of the BF16 part are BF16, unscaled.
        row_scale: `score_scale` over the query's scaling, for head lane/4 and head + 8.
        score_scale: factor of a score.
        rows: address of the first of 16 rows of K.
        scales: address of the scales of the first row, 8 bytes a row.
        half: of the dims: 0, scale groups 0 to 3; 1, groups 4 to 6 and the BF16 part.
        lane: of the warp.
        out: registers.
    """
    group_scales = load_group_scales(scales + half * 4, lane)
    totals = [zero_tile() for _ in range(TILES)]
    for group in cutlass.range_constexpr(3):
        totals = add_group(cfg, query, rows, half * 16, group, lane, group_scales, totals)
    for tile in cutlass.range_constexpr(TILES):
        for i in cutlass.range_constexpr(4):
            out[tile * 4 + i] = totals[tile][i] * row_scale[i // 2]
    if half == 0:
        last = add_group(cfg, query, rows, Int32(0), 3, lane, group_scales, [zero_tile() for _ in range(TILES)])
        for tile in cutlass.range_constexpr(TILES):
            for i in cutlass.range_constexpr(4):
                out[tile * 4 + i] = out[tile * 4 + i] + last[tile][i] * row_scale[i // 2]
    else:
        rope = _scores_bf16(cfg, query[12:], rows, Int32(28), lane)
        for tile in cutlass.range_constexpr(TILES):
            for i in cutlass.range_constexpr(4):
                out[tile * 4 + i] = out[tile * 4 + i] + rope[tile][i] * score_scale


def load_group_scales(scales: Int32, lane: Int32) -> list[list[Uint32]]:
    """For each tile, the 4 scale bytes of this lane's two columns."""
    return [
        [cluster.ld_shared(scales + (tile * 8 + (lane % 4) * 2 + column) * 8) for column in range(2)]
        for tile in range(TILES)
    ]


def add_group(
    cfg: SparseMlaConfig,
    query: Fragments,
    rows: Int32,
    granule: Int32,
    group: int,
    lane: Int32,
    group_scales: list[list[Uint32]],
    totals: list[Tile],
) -> list[Tile]:
    """Adds one scale group of 64 dims: its sum of products times the scale of each column."""
    added = []
    for tile in range(TILES):
        sums = zero_tile()
        at = granules_of_rows(cfg, rows + tile * 8 * cfg.layout.data_bytes, granule + group * 4, lane)
        for i, word in enumerate(mma.ldmatrix_x4(at)):
            sums = mma.mma_m16n8k16_f16(query[group * 4 + i], mma.cvt_e4m3x4_f16x2(word), sums)
        factors = [ue8m0_f32(group_scales[tile][column], group) for column in range(2)]
        added.append([totals[tile][i] + sums[i] * factors[i % 2] for i in range(4)])
    return added


def ue8m0_f32(word: Uint32, byte: int) -> Float32:
    """2 ** (byte - 127); NaN for 255."""
    exponent = (word >> Uint32(8 * byte)) & Uint32(0xFF)
    bits = exponent << Uint32(23)
    bits = cutlass.select_(exponent == Uint32(0), Uint32(0x00400000), bits)
    return mma.bits_f32(cutlass.select_(exponent == Uint32(255), Uint32(0x7FC00000), bits))


def _scores_bf16(cfg: SparseMlaConfig, query: Fragments, rows: Int32, granule: Int32, lane: Int32) -> list[Tile]:
    """Products over BF16 granules from `granule` on, two for each k-step of `query`."""
    sums = [[zero_tile(), zero_tile()] for _ in range(TILES)]
    for pair in range(len(query) // 2):
        for tile in range(TILES):
            at = granules_of_rows(cfg, rows + tile * 8 * cfg.layout.data_bytes, granule + pair * 4, lane)
            words = mma.ldmatrix_x4(at)
            for i in range(2):
                sums[tile][i] = mma.mma_m16n8k16_bf16(query[pair * 2 + i], words[2 * i : 2 * i + 2], sums[tile][i])
    return [_add(*pair) for pair in sums]


def _add(a: Tile, b: Tile) -> Tile:
    return [x + y for x, y in zip(a, b, strict=True)]
