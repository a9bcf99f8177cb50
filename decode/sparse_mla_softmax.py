# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: softmax over a CTA's columns, by one table of maxima and one of sums.

Exponents are base 2. Sums and probabilities are relative to the CTA's maximum; what it is over the cluster only the
merge knows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from decode.sparse_mla_layout import WARPS, SparseMlaConfig
from nvcomm.ptx import mma, shared


def put_maxima(cfg: SparseMlaConfig, base: Int32, sums: cute.Tensor, active: Uint32, warp: Int32, lane: Int32) -> None:
    """Masks this warp's scores and puts their maxima into the table. On return all maxima and all of K are visible.

    Args:
        cfg: compile-time facts.
        base: address of this CTA's shared memory.
        sums: scores in units of log2, tile by tile.
        active: 8 bits a tile: which columns take part.
        warp: of the CTA.
        lane: of the warp.
    """
    for i in range(cfg.kept_tiles * 4):
        bit = (active >> Uint32(i // 4 * 8 + i % 2 + (lane % 4) * 2)) & Uint32(1)
        sums[i] = cutlass.select_(bit != Uint32(0), sums[i], Float32(-float("inf")))
    for h in range(2):
        best = quad_reduce([sums[i] for i in of_head(cfg, h)], largest=True)
        at = base + cfg.maxima_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, best, lane % 4 == 0)
    cute.arch.sync_threads()


def of_head(cfg: SparseMlaConfig, h: int) -> list[int]:
    """Which of a lane's scores belong to head lane / 4 + 8 h."""
    return [tile * 4 + 2 * h + i for tile in range(cfg.kept_tiles) for i in range(2)]


def put_weights(cfg: SparseMlaConfig, base: Int32, sums: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """Turns scores into probabilities relative to the CTA's maximum, in the scratch as A fragments; l into its table.

    On return they are visible to the CTA.
    """
    for h in range(2):
        shift = finite(over_warps(base + cfg.maxima_at, lane // 4 + 8 * h, largest=True))
        for i in of_head(cfg, h):
            sums[i] = mma.ex2(sums[i] - shift)
    # F16 holds a probability to 11 bits; the other records need BF16's range for their values.
    pack = mma.cvt_rn_f16x2 if cfg.f16_parts else mma.cvt_rn_bf16x2
    for index in range(cfg.kept_tiles):
        tile, there = kept_tile(cfg, warp, index)
        words = [pack(sums[4 * index + 2 * i], sums[4 * index + 2 * i + 1]) for i in range(2)]
        # A k-step is two tiles: registers a0, a1 and a2, a3 of its A fragment.
        at = base + cfg.scratch_at + tile // 2 * 512 + lane * 16 + tile % 2 * 8
        shared.st_shared_v2(at, words, there)
    for h in range(2):
        total = quad_reduce([sums[i] for i in of_head(cfg, h)], largest=False)
        at = base + cfg.sums_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, total, lane % 4 == 0)
    cute.arch.sync_threads()


def kept_tile(cfg: SparseMlaConfig, warp: Int32, index: int) -> tuple[Int32, Boolean | None]:
    """The CTA's number of a tile that this warp finishes, and whether it does: of 5 tiles half 1 has only two."""
    group, half = warp // 2, warp % 2
    own = cfg.tiles // 2
    if index < own:
        return group * cfg.tiles + (cfg.tiles - own) * half + index, None
    return group * cfg.tiles + index, half == 0


def quad_reduce(values: list[Float32], largest: bool) -> Float32:
    """Maximum or sum over these values and those of the 4 lanes that hold one head's columns."""
    value = reduce_pairs(values, largest)
    for offset in (1, 2):
        value = reduce_pairs([value, cute.arch.shuffle_sync_bfly(value, offset=offset)], largest)
    return value


def over_warps(table: Int32, head: Int32, largest: bool) -> Float32:
    """Maximum or sum of a head's 8 entries of a table."""
    row = table + head * (WARPS * 4)
    return reduce_pairs([*shared.ld_shared_v4_f32(row), *shared.ld_shared_v4_f32(row + 16)], largest)


def reduce_pairs(values: list[Float32], largest: bool) -> Float32:
    """Maximum or sum, as a tree."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[len(values) // 2 * 2 :]
        values = [cute.arch.fmax(a, b) if largest else a + b for a, b in pairs] + rest
    return values[0]


def finite(maximum: Float32) -> Float32:
    """What to subtract: -inf means no active column, and -inf - -inf would be NaN."""
    return cutlass.select_(maximum == Float32(-float("inf")), Float32(0.0), maximum)
