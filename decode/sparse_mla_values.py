# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: probabilities times values, 16 heads x 64 dims a warp over all 128 columns.

The contraction runs over columns, so B fragments pair two columns of one dim: a transposed ldmatrix. Its elements have
16 bits, two E4M3 values: a byte permutation and two conversions make of each word a fragment for the even dims and one
for the odd dims, so that a lane ends up with 4 consecutive dims.

Each function returns 8 *units* of 4 floats: unit 2c + h is 8 heads (lane/4 + 8h) x 16 dims (64 warp + 16c ..), of which
a lane has 4 dims: 4(lane%4) .. + 3 (E4M3), or 2(lane%4), + 1, + 8, + 9 (BF16).
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32

from decode.sparse_mla_layout import COLUMNS, GRANULE, SparseMlaConfig
from nvcomm.ptx import cluster, mma, shared

STEPS = COLUMNS // 16
Units = list[list[Float32]]
# Bytes 0, 2, 1, 3: (column j, even dim), (j + 1, even), (j, odd), (j + 1, odd).
PAIR_COLUMNS = 0x3120


def load_probabilities(scratch: Int32, lane: Int32) -> list[tuple[Uint32, ...]]:
    """The A fragments of the 8 k-steps, as every warp left its own."""
    return [cluster.ld_shared_v4(scratch + (step * 32 + lane) * 16) for step in range(STEPS)]


def values_fp8(cfg: SparseMlaConfig, rows: Int32, scratch: Int32, warp: Int32, lane: Int32) -> Units:
    """Plain E4M3 records, F16 probabilities."""
    probabilities = load_probabilities(scratch, lane)
    sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(4)]
    for step in range(STEPS):
        for pair in range(2):
            words = mma.ldmatrix_x4_trans(granules_of_columns(cfg, rows, step, warp * 4 + pair * 2, lane))
            for i in range(2):
                near = mma.cvt_e4m3x4_f16x2(mma.prmt(words[2 * i], PAIR_COLUMNS))
                far = mma.cvt_e4m3x4_f16x2(mma.prmt(words[2 * i + 1], PAIR_COLUMNS))
                tile = sums[pair * 2 + i]
                for odd in range(2):
                    tile[odd] = mma.mma_m16n8k16_f16(probabilities[step], (near[odd], far[odd]), tile[odd])
    return _units_of_parities(sums)


def values_scaled(cfg: SparseMlaConfig, rows: Int32, scales: Int32, scratch: Int32, warp: Int32, lane: Int32) -> Units:
    """The E4M3 part of scaled records; warp w takes scale group w. BF16 probabilities take up the scale exactly."""
    probabilities = load_probabilities(scratch, lane)
    sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(4)]
    for step in range(STEPS):
        at = scales + (step * 16 + (lane % 4) * 2) * 8 + warp
        near_scale, far_scale = _scale_pair(at), _scale_pair(at + 8 * 8)
        words = probabilities[step]
        scaled = [mma.mul_bf16x2(words[i], near_scale if i < 2 else far_scale) for i in range(4)]
        for pair in range(2):
            words = mma.ldmatrix_x4_trans(granules_of_columns(cfg, rows, step, warp * 4 + pair * 2, lane))
            for i in range(2):
                near = _e4m3x4_bf16x2(mma.prmt(words[2 * i], PAIR_COLUMNS))
                far = _e4m3x4_bf16x2(mma.prmt(words[2 * i + 1], PAIR_COLUMNS))
                tile = sums[pair * 2 + i]
                for odd in range(2):
                    tile[odd] = mma.mma_m16n8k16_bf16(scaled, (near[odd], far[odd]), tile[odd])
    return _units_of_parities(sums)


def values_bf16(cfg: SparseMlaConfig, rows: Int32, scratch: Int32, granule: Int32, lane: Int32) -> Units:
    """BF16 values, BF16 probabilities; 8 granules of 8 dims from `granule` on."""
    probabilities = load_probabilities(scratch, lane)
    sums = [[Float32(0.0)] * 4 for _ in range(8)]
    for step in range(STEPS):
        for pair in range(4):
            words = mma.ldmatrix_x4_trans(granules_of_columns(cfg, rows, step, granule + pair * 2, lane))
            for i in range(2):
                tile = pair * 2 + i
                sums[tile] = mma.mma_m16n8k16_bf16(probabilities[step], words[2 * i : 2 * i + 2], sums[tile])
    units = []
    for c in range(4):
        near, far = sums[2 * c], sums[2 * c + 1]
        units += [[near[2 * h], near[2 * h + 1], far[2 * h], far[2 * h + 1]] for h in range(2)]
    return units


def granules_of_columns(cfg: SparseMlaConfig, rows: Int32, step: int, granule: Int32, lane: Int32) -> Int32:
    """Address for a transposed ldmatrix: columns 0-7 and 8-15 at `granule`, then both at the next granule."""
    column = step * 16 + lane % 16
    return rows + column * cfg.layout.data_bytes + cfg.swizzle(granule + lane // 16, lane % 16) * GRANULE


def _units_of_parities(sums: list[list[list[Float32]]]) -> Units:
    units = []
    for even, odd in sums:
        units += [[even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]] for h in range(2)]
    return units


def _scale_pair(addr: Int32) -> Uint32:
    """The scales of two neighbouring columns as BF16 powers of two: UE8M0 is BF16's exponent field."""
    return (shared.ld_shared_u8(addr) << Uint32(7)) | (shared.ld_shared_u8(addr + 8) << Uint32(23))


def _e4m3x4_bf16x2(word: Uint32) -> tuple[Uint32, Uint32]:
    low, high = mma.cvt_e4m3x4_f16x2(word)
    return mma.cvt_rn_bf16x2(*mma.cvt_f16x2_f32(low)), mma.cvt_rn_bf16x2(*mma.cvt_f16x2_f32(high))
