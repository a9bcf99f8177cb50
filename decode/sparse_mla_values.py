# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: probabilities times values, 16 heads x 64 dims a warp over all columns.

The contraction runs over columns, so B fragments pair two columns of one dim: a transposed ldmatrix. Its elements have
16 bits, two E4M3 values: a byte permutation and two conversions make of each word a fragment for the even dims and one
for the odd dims, so that a lane ends up with 4 consecutive dims.

Each function fills 32 registers, tile by tile: 4 x 2 tiles of 16 heads x 8 dims; `tile_values` sorts them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from decode.kv_cache import BF16
from decode.sparse_mla_layout import GRANULE, SparseMlaConfig
from nvcomm.ptx import cluster, mma, shared

EARLY_STEPS = 2
# Bytes 0, 2, 1, 3: (column j, even dim), (j + 1, even), (j, odd), (j + 1, odd).
PAIR_COLUMNS = 0x3120


def early_values(cfg: SparseMlaConfig, base: Int32, warp: Int32, lane: Int32) -> list:
    """B fragments of the first steps of plain E4M3 records, for whoever has time while the probabilities are made."""
    if not cfg.f16_parts:
        return []
    return [value_fragments(cfg, base, step, warp, lane) for step in range(EARLY_STEPS)]


@cute.jit
def compute_values(
    cfg: cutlass.Constexpr, base: Int32, early: list, warp: Int32, lane: Int32, units: cute.Tensor
) -> None:
    """Partial outputs of this warp's 64 dims into 32 registers: 4 floats for each (16 dims, 8 heads): `tile_values`.

    The 4 are dims 4(lane%4) .. + 3 of the 16 (E4M3), or 2(lane%4), + 1, + 8, + 9 (BF16).
    """
    sums = cute.make_rmem_tensor(32, Float32)
    sums.fill(0.0)
    if const_expr(cfg.scaled):
        if warp < 7:
            values_fp8(cfg, base, early, warp, lane, sums)
            put_units(units, sums, True)
        else:
            values_bf16(cfg, base, Int32(28), lane, sums)
            put_units(units, sums, False)
    elif const_expr(cfg.layout == BF16):
        values_bf16(cfg, base, warp * 8, lane, sums)
        put_units(units, sums, False)
    else:
        values_fp8(cfg, base, early, warp, lane, sums)
        put_units(units, sums, True)


def values_fp8(cfg: SparseMlaConfig, base: Int32, early: list, warp: Int32, lane: Int32, sums: cute.Tensor) -> None:
    """E4M3 values: 4 granules of 16 dims, tiles (granule, even or odd dims). Scaled: warp w takes scale group w."""
    product = mma.mma_m16n8k16_f16 if cfg.f16_parts else mma.mma_m16n8k16_bf16
    weights = load_weights(cfg, base, lane)
    for step in range(cfg.columns // 16):
        fragments = early[step] if step < len(early) else value_fragments(cfg, base, step, warp, lane)
        a = weights[step]
        if cfg.scaled:
            a = scaled_weights(a, base + cfg.scales_at + (step * 16 + (lane % 4) * 2) * 8 + warp)
        for tile, b in enumerate(fragments):
            add_product(product, a, b, sums, tile)


def value_fragments(cfg: SparseMlaConfig, base: Int32, step: int, warp: Int32, lane: Int32) -> list[tuple]:
    """B fragments of 16 columns x 8 tiles of 8 dims: even and odd dims of 4 granules."""
    fragments = []
    for pair in range(2):
        words = mma.ldmatrix_x4_trans(base + granules_of_columns(cfg, step, warp * 4 + pair * 2, lane))
        for i in range(2):
            near = unpack(cfg, mma.prmt(words[2 * i], PAIR_COLUMNS))
            far = unpack(cfg, mma.prmt(words[2 * i + 1], PAIR_COLUMNS))
            fragments += [(near[odd], far[odd]) for odd in range(2)]
    return fragments


def values_bf16(cfg: SparseMlaConfig, base: Int32, granule: Int32, lane: Int32, sums: cute.Tensor) -> None:
    """BF16 values: 8 granules of 8 dims from `granule` on, a tile each."""
    fragments = load_weights(cfg, base, lane)
    for step in range(cfg.columns // 16):
        weights = fragments[step]
        for pair in range(4):
            words = mma.ldmatrix_x4_trans(base + granules_of_columns(cfg, step, granule + pair * 2, lane))
            for i in range(2):
                add_product(mma.mma_m16n8k16_bf16, weights, words[2 * i : 2 * i + 2], sums, pair * 2 + i)


def load_weights(cfg: SparseMlaConfig, base: Int32, lane: Int32) -> list[tuple[Uint32, ...]]:
    """The A fragments of the k-steps, as every warp left its own."""
    return [cluster.ld_shared_v4(base + cfg.scratch_at + (step * 32 + lane) * 16) for step in range(cfg.columns // 16)]


def add_product(product: object, a: tuple, b: tuple, sums: cute.Tensor, tile: int) -> None:
    """Adds a product to a tile of the accumulators."""
    for i, value in enumerate(product(a, b, [sums[tile * 4 + i] for i in range(4)])):
        sums[tile * 4 + i] = value


def granules_of_columns(cfg: SparseMlaConfig, step: Int32, granule: Int32, lane: Int32) -> Int32:
    """Offset for a transposed ldmatrix: columns 0-7 and 8-15 of a step at `granule`, then both at the next granule."""
    column = lane % 16
    return (step * 16 + column) * cfg.row_bytes + cfg.swizzle(granule + lane // 16, column) * GRANULE


def tile_values(units: cute.Tensor, c: int, h: int) -> list[Float32]:
    """A lane's 4 of the 8 heads (lane/4 + 8h) x 16 dims (64 warp + 16c ..): see `compute_values` for which dims."""
    return [units[(2 * c + h) * 4 + j] for j in range(4)]


def put_units(units: cute.Tensor, sums: cute.Tensor, parities: bool) -> None:
    """Sorts the accumulators of 8 tiles: two tiles interleave (even and odd dims) or follow each other."""
    for c in range(4):
        near, far = 8 * c, 8 * c + 4
        for h in range(2):
            a, b, x, y = (sums[near + 2 * h], sums[near + 2 * h + 1], sums[far + 2 * h], sums[far + 2 * h + 1])
            for j, value in enumerate((a, x, b, y) if parities else (a, b, x, y)):
                units[(2 * c + h) * 4 + j] = value


def unpack(cfg: SparseMlaConfig, word: Uint32) -> tuple[Uint32, Uint32]:
    """Four E4M3 values in the type of the products, exactly."""
    low, high = mma.cvt_e4m3x4_f16x2(word)
    if cfg.scaled:
        return mma.cvt_rn_bf16x2(*mma.cvt_f16x2_f32(low)), mma.cvt_rn_bf16x2(*mma.cvt_f16x2_f32(high))
    return low, high


def scaled_weights(weights: tuple, scales: Int32) -> list[Uint32]:
    """BF16 probabilities times the scales of their columns: powers of two, so exact."""
    near, far = scale_pair(scales), scale_pair(scales + 8 * 8)
    return [mma.mul_bf16x2(weights[i], near if i < 2 else far) for i in range(4)]


def scale_pair(addr: Int32) -> Uint32:
    """The scales of two neighbouring columns as BF16 powers of two: UE8M0 is BF16's exponent field."""
    return (shared.ld_shared_u8(addr) << Uint32(7)) | (shared.ld_shared_u8(addr + 8) << Uint32(23))
