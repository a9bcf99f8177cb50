# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: probabilities times values, 16 heads x 64 dims a warp over all 128 columns.

The contraction runs over columns, so B fragments pair two columns of one dim: a transposed ldmatrix. Its elements have
16 bits, two E4M3 values: a byte permutation and two conversions make of each word a fragment for the even dims and one
for the odd dims, so that a lane ends up with 4 consecutive dims.

Each function fills 8 *units* of 4 floats: unit 2c + h is 8 heads (lane/4 + 8h) x 16 dims (64 warp + 16c ..), of which
a lane has 4 dims: 4(lane%4) .. + 3 (E4M3), or 2(lane%4), + 1, + 8, + 9 (BF16).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from decode.kv_cache import BF16
from decode.sparse_mla_layout import COLUMNS, GRANULE, SparseMlaConfig
from nvcomm.ptx import cluster, mma, shared

STEPS = COLUMNS // 16
# Bytes 0, 2, 1, 3: (column j, even dim), (j + 1, even), (j, odd), (j + 1, odd).
PAIR_COLUMNS = 0x3120


@cute.jit
def compute_values(cfg: cutlass.Constexpr, base: Int32, warp: Int32, lane: Int32, units: cute.Tensor) -> None:
    """Partial outputs of this warp's 64 dims into 32 registers."""
    sums = cute.make_rmem_tensor(32, Float32)
    sums.fill(0.0)
    if const_expr(cfg.scaled):
        if warp < 7:
            values_fp8(cfg, base, warp, lane, sums)
            put_units(units, sums, True)
        else:
            values_bf16(cfg, base, Int32(28), lane, sums)
            put_units(units, sums, False)
    elif const_expr(cfg.layout == BF16):
        values_bf16(cfg, base, warp * 8, lane, sums)
        put_units(units, sums, False)
    else:
        values_fp8(cfg, base, warp, lane, sums)
        put_units(units, sums, True)


@cute.jit
def values_fp8(cfg: cutlass.Constexpr, base: Int32, warp: Int32, lane: Int32, sums: cute.Tensor) -> None:
    """E4M3 values: 4 granules of 16 dims, tiles (granule, even or odd dims). Scaled: warp w takes scale group w."""
    for step in cutlass.range(STEPS, unroll=2):
        weights = cluster.ld_shared_v4(base + cfg.scratch_at + (step * 32 + lane) * 16)
        if const_expr(cfg.scaled):
            weights = scaled_weights(weights, base + cfg.scales_at + (step * 16 + (lane % 4) * 2) * 8 + warp)
        for pair in range_constexpr(2):
            words = mma.ldmatrix_x4_trans(base + granules_of_columns(cfg, step, warp * 4 + pair * 2, lane))
            for i in range_constexpr(2):
                near = unpack(cfg, mma.prmt(words[2 * i], PAIR_COLUMNS))
                far = unpack(cfg, mma.prmt(words[2 * i + 1], PAIR_COLUMNS))
                for odd in range_constexpr(2):
                    product = mma.mma_m16n8k16_bf16 if cfg.scaled else mma.mma_m16n8k16_f16
                    add_product(product, weights, (near[odd], far[odd]), sums, (pair * 2 + i) * 2 + odd)


@cute.jit
def values_bf16(cfg: cutlass.Constexpr, base: Int32, granule: Int32, lane: Int32, sums: cute.Tensor) -> None:
    """BF16 values: 8 granules of 8 dims from `granule` on, a tile each."""
    for step in cutlass.range(STEPS, unroll=2):
        weights = cluster.ld_shared_v4(base + cfg.scratch_at + (step * 32 + lane) * 16)
        for pair in range_constexpr(4):
            words = mma.ldmatrix_x4_trans(base + granules_of_columns(cfg, step, granule + pair * 2, lane))
            for i in range_constexpr(2):
                add_product(mma.mma_m16n8k16_bf16, weights, words[2 * i : 2 * i + 2], sums, pair * 2 + i)


def add_product(product: object, a: tuple, b: tuple, sums: cute.Tensor, tile: int) -> None:
    """Adds a product to a tile of the accumulators."""
    for i, value in enumerate(product(a, b, [sums[tile * 4 + i] for i in range(4)])):
        sums[tile * 4 + i] = value


def granules_of_columns(cfg: SparseMlaConfig, step: Int32, granule: Int32, lane: Int32) -> Int32:
    """Offset for a transposed ldmatrix: columns 0-7 and 8-15 of a step at `granule`, then both at the next granule."""
    column = lane % 16
    return (step * 16 + column) * cfg.layout.data_bytes + cfg.swizzle(granule + lane // 16, column) * GRANULE


def put_units(units: cute.Tensor, sums: cute.Tensor, parities: bool) -> None:
    """Accumulators of 8 tiles as 8 units: two tiles interleave (even and odd dims) or follow each other."""
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
