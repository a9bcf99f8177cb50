# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: the merge of a token's partial outputs over its cluster.

Every CTA finishes 1 / chunks of the output. Each CTA pushes the units that it needs, unnormalised, straight into its
inbox, and before that (m, l) into its stats. An mbarrier for each counts the bytes: once all have come, everything
that the CTA reads is its own, so it may exit when done. The arrival at the cluster barrier in front of all that is
relaxed: a release would wait for the whole gather, and the mbarriers, all there is to release, have a fence of their
own. Exponents are base 2; l is relative to m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr

from decode.kv_cache import BF16
from decode.sparse_mla_layout import HEADS, UNIT_BYTES, WARPS, SparseMlaConfig
from decode.sparse_mla_softmax import finite, over_warps
from decode.sparse_mla_values import tile_values
from nvcomm.ptx import cluster, memory, mma, shared

LN2 = 0.6931471805599453


@cute.jit
def open_inbox(cfg: cutlass.Constexpr, base: Int32, rank: Int32, thread: Int32) -> None:
    """Makes the mbarriers of inbox and stats and tells them what is to come. A cluster barrier is before the pushes."""
    if thread == 0:
        cluster.mbarrier_init(base + cfg.mbarriers_at, 1)
        cluster.mbarrier_init(base + cfg.mbarriers_at + 8, 1)
        cluster.fence_mbarrier_init_release_cluster()
        owned = (cfg.units + cfg.chunks - 1 - rank) // cfg.chunks
        cluster.mbarrier_arrive_expect_tx(base + cfg.mbarriers_at, Uint32(owned * (cfg.chunks * UNIT_BYTES)))
        cluster.mbarrier_arrive_expect_tx(base + cfg.mbarriers_at + 8, Uint32(cfg.chunks * HEADS * 8))


def push(cfg: SparseMlaConfig, base: Int32, units: cute.Tensor, rank: Int32, warp: Int32, lane: Int32) -> None:
    """Sends every unit u of this warp to the CTA that finishes it, u % chunks, as its piece u // chunks."""
    first = warp * cfg.warp_units
    whole, rest = first // cfg.chunks, first % cfg.chunks
    for i in range(cfg.warp_units):
        owner, slot = rest + i % cfg.chunks, whole + i // cfg.chunks
        wraps = owner >= cfg.chunks
        owner = cutlass.select_(wraps, owner - cfg.chunks, owner)
        slot = cutlass.select_(wraps, slot + 1, slot)
        at = base + part_offset(cfg, rank, owner, slot) + lane * 16
        words = unit_words(cfg, units, i)
        mbarrier = cluster.mapa(base + cfg.mbarriers_at, owner)
        cluster.st_async_cluster_v4(cluster.mapa(at, owner), words, mbarrier)


def unit_words(cfg: SparseMlaConfig, units: cute.Tensor, i: int) -> list[Uint32]:
    """A lane's 16 bytes of unit i of its warp: half i % head_halves of the heads, group i // head_halves of dims."""
    c, h = i // cfg.head_halves, i % cfg.head_halves
    if cfg.f16_parts:
        values = tile_values(units, 2 * c, h) + tile_values(units, 2 * c + 1, h)
        if cfg.part_scale != 1.0:
            values = [value * Float32(cfg.part_scale) for value in values]
        return [mma.cvt_rn_f16x2(values[2 * j], values[2 * j + 1]) for j in range(4)]
    return [mma.f32_bits(value) for value in tile_values(units, c, h)]


def part_values(cfg: SparseMlaConfig, words: tuple[Uint32, ...]) -> list[Float32]:
    """The 8 or 4 numbers in `unit_words`."""
    if cfg.f16_parts:
        return [value for word in words for value in mma.cvt_f16x2_f32(word)]
    return [mma.bits_f32(word) for word in words]


def part_offset(cfg: SparseMlaConfig, sender: Int32, owner: Int32, slot: Int32) -> Int32:
    """Where the sender's part of a unit lies in the owner's shared memory; the inbox has no room for its own."""
    row = sender - cutlass.select_(sender > owner, Int32(1), Int32(0))
    theirs = cfg.inbox_at + (row * cfg.unit_slots + slot) * UNIT_BYTES
    return cutlass.select_(sender == owner, cfg.own_at + slot * UNIT_BYTES, theirs)


def push_stats(cfg: SparseMlaConfig, base: Int32, rank: Int32, warp: Int32, lane: Int32) -> None:
    """Lane 2 c + i of warp w sends this CTA's (m, l) of head 2 w + i to CTA c, its own included."""
    head, cta = warp * 2 + lane % 2, cutlass.min(lane // 2, Int32(cfg.chunks - 1))
    maximum = over_warps(base + cfg.maxima_at, head, largest=True)
    total = over_warps(base + cfg.sums_at, head, largest=False)
    addr = base + cfg.stats_at + (rank * HEADS + head) * 8
    wanted = lane < 2 * cfg.chunks
    if cfg.chunks > 1:
        mbarrier = cluster.mapa(base + cfg.mbarriers_at + 8, cta)
        shared.st_async_cluster_v2_f32(cluster.mapa(addr, cta), (maximum, total), mbarrier, wanted)
    else:
        shared.st_shared_v2_f32(addr, (maximum, total), wanted)


def head_weights(cfg: SparseMlaConfig, base: Int32, head: Int32) -> tuple[list[Float32], Float32]:
    """What every CTA's partial output of a head counts for, and the natural log of the sum of exponentials.

    The latter is without the sink, and +inf for no active column; then all weights are 0.
    """
    stats = [shared.ld_shared_v2_f32(base + cfg.stats_at + (r * HEADS + head) * 8) for r in range(cfg.chunks)]
    maximum = stats[0][0]
    for r in range(1, cfg.chunks):
        maximum = cute.arch.fmax(maximum, stats[r][0])
    shift = finite(maximum)
    factors = [mma.ex2(m - shift) for m, _ in stats]
    total = Float32(0.0)
    for factor, (_, part) in zip(factors, stats, strict=True):
        total = total + factor * part
    divisor = total
    if cfg.sink:
        divisor = total + mma.ex2(shared.ld_shared_f32(base + cfg.sinks_at + head * 4) - shift)
    empty = total == Float32(0.0)
    inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(divisor))
    lse = cutlass.select_(empty, Float32(float("inf")), (maximum + mma.lg2(total)) * Float32(LN2))
    return [factor * inverse for factor in factors], lse


@cute.jit
def finish(
    cfg: cutlass.Constexpr,
    base: Int32,
    out: Int64,
    lse: Int64,
    out_scale: Float32,
    rank: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Waits for the inbox, adds up and stores this CTA's units.

    `out` and `lse`: addresses of the first of 16 heads of this token.
    """
    turns = -(-cfg.unit_slots // WARPS)
    cluster.mbarrier_wait_parity(base + cfg.mbarriers_at + 8, 0)
    weights = []
    for turn in range_constexpr(turns):
        unit = (turn * WARPS + warp) * cfg.chunks + rank
        head = lane // 4 + 8 * (unit % cfg.head_halves)
        factors, head_lse = head_weights(cfg, base, head)
        store_lse(lse, head, head_lse, (unit < cfg.head_halves) & (lane % 4 == 0))
        weights.append([factor * (out_scale * Float32(1.0 / cfg.part_scale)) for factor in factors])
    cluster.mbarrier_wait_parity(base + cfg.mbarriers_at, 0)
    for turn in range_constexpr(turns):
        slot = turn * WARPS + warp
        unit = slot * cfg.chunks + rank
        if unit < cfg.units:
            sums = [Float32(0.0)] * (4 * cfg.unit_tiles)
            for sender in range_constexpr(cfg.chunks):
                at = base + part_offset(cfg, Int32(sender), rank, slot) + lane * 16
                part = part_values(cfg, cluster.ld_shared_v4(at))
                sums = [a + b * weights[turn][sender] for a, b in zip(sums, part, strict=True)]
            head, dim = (lane // 4 + 8 * (unit % cfg.head_halves), unit // cfg.head_halves * (16 * cfg.unit_tiles))
            for tile in range_constexpr(cfg.unit_tiles):
                store_values(cfg, out, head, dim + 16 * tile, sums[4 * tile : 4 * tile + 4], lane)


def finish_alone(
    cfg: SparseMlaConfig,
    base: Int32,
    out: Int64,
    lse: Int64,
    out_scale: Float32,
    units: cute.Tensor,
    warp: Int32,
    lane: Int32,
) -> None:
    """As `finish`, for a cluster of one: all partial outputs are this CTA's own, in registers."""
    for h in range(cfg.head_halves):
        head = lane // 4 + 8 * h
        (factor,), head_lse = head_weights(cfg, base, head)
        store_lse(lse, head, head_lse, (warp == 0) & (lane % 4 == 0))
        for c in range(4):
            scaled = [value * factor * out_scale for value in tile_values(units, c, h)]
            store_values(cfg, out, head, warp * 64 + c * 16, scaled, lane)


def store_values(cfg: SparseMlaConfig, out: Int64, head: Int32, dim: Int32, values: list[Float32], lane: Int32) -> None:
    """Stores a lane's four of 16 outputs as BF16: 4 dims in a row, or for BF16 values two pairs 8 dims apart."""
    at = out + Int64(head * 512 + dim) * 2
    low, high = (mma.cvt_rn_bf16x2(values[0], values[1]), mma.cvt_rn_bf16x2(values[2], values[3]))
    together, apart = Int64(lane % 4) * 8, Int64(lane % 4) * 4
    if cfg.scaled:
        rope = dim >= cfg.layout.fp8_dims
        memory.st_weak_b32(at + cutlass.select_(rope, apart, together), low)
        memory.st_weak_b32(at + cutlass.select_(rope, apart + 16, together + 4), high)
    elif cfg.layout == BF16:
        memory.st_weak_b32(at + apart, low)
        memory.st_weak_b32(at + apart + 16, high)
    else:
        memory.st_weak_v2(at + together, (low, high))


def store_lse(lse: Int64, head: Int32, value: Float32, predicate: Boolean) -> None:
    """Stores a head's log of the sum of exponentials."""
    cute.arch.inline_ptx(
        "st.global.f32 [{$r0}], {$r1};", read_only_args=[lse + Int64(head) * 4, value], predicate=predicate
    )
