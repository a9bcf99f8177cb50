# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: softmax over a CTA's 128 columns, and the merge of a token's partial outputs over its cluster.

Every CTA finishes 1 / chunks of the output. The others push the units it needs, unnormalised, straight into its inbox,
and their (m, l) into its stats; one cluster barrier later everything it reads is its own, so it may exit when done.
Exponents are base 2; l is relative to m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from decode.kv_cache import BF16
from decode.sparse_mla_layout import HEADS, UNIT_BYTES, UNITS, WARPS, SparseMlaConfig
from nvcomm.ptx import cluster, memory, mma, shared

LN2 = 0.6931471805599453


@cute.jit
def softmax(cfg: cutlass.Constexpr, base: Int32, sums: cute.Tensor, active: Uint32, warp: Int32, lane: Int32) -> None:
    """Probabilities of this warp's 16 columns, relative to the CTA's maximum, into the scratch; l into its table.

    On return every warp's probabilities and sums are visible to the CTA, and so is all of K.

    Args:
        cfg: compile-time facts.
        base: address of this CTA's shared memory.
        sums: scores in units of log2, two tiles of 8 columns.
        active: bit i: column i of the 16 takes part.
        warp: of the CTA.
        lane: of the warp.
    """
    for tile in range_constexpr(2):
        for i in range_constexpr(4):
            bit = (active >> Uint32(tile * 8 + i % 2 + (lane % 4) * 2)) & Uint32(1)
            sums[tile * 4 + i] = cutlass.select_(bit != Uint32(0), sums[tile * 4 + i], Float32(-float("inf")))
    for h in range_constexpr(2):
        best = quad_reduce([sums[2 * h], sums[2 * h + 1], sums[2 * h + 4], sums[2 * h + 5]], largest=True)
        at = base + cfg.maxima_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, best, lane % 4 == 0)
    cute.arch.sync_threads()
    for h in range_constexpr(2):
        shift = finite(over_warps(base + cfg.maxima_at, lane // 4 + 8 * h, largest=True))
        for i in (2 * h, 2 * h + 1, 2 * h + 4, 2 * h + 5):
            sums[i] = mma.ex2(sums[i] - shift)
        total = quad_reduce([sums[2 * h], sums[2 * h + 1], sums[2 * h + 4], sums[2 * h + 5]], largest=False)
        at = base + cfg.sums_at + ((lane // 4 + 8 * h) * WARPS + warp) * 4
        shared.st_shared_f32(at, total, lane % 4 == 0)
    # F16 holds a probability to 11 bits; the other records need BF16's range for their values.
    pack = mma.cvt_rn_bf16x2 if cfg.scaled or cfg.layout == BF16 else mma.cvt_rn_f16x2
    fragment = [pack(sums[2 * i], sums[2 * i + 1]) for i in range(4)]
    cluster.st_shared_v4(base + cfg.scratch_at + (warp * 32 + lane) * 16, fragment)
    cute.arch.sync_threads()


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
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [cute.arch.fmax(a, b) if largest else a + b for a, b in pairs]
    return values[0]


def finite(maximum: Float32) -> Float32:
    """What to subtract: -inf means no active column, and -inf - -inf would be NaN."""
    return cutlass.select_(maximum == Float32(-float("inf")), Float32(0.0), maximum)


def push(cfg: SparseMlaConfig, base: Int32, units: cute.Tensor, rank: Int32, warp: Int32, lane: Int32) -> None:
    """Sends every unit u = 8 warp + i to the CTA that finishes it, u % chunks, as its piece u // chunks."""
    first = warp * 8
    whole, rest = first // cfg.chunks, first % cfg.chunks
    for i in range(8):
        if cfg.few_heads and i % 2:
            continue
        owner, slot = rest + i % cfg.chunks, whole + i // cfg.chunks
        wraps = owner >= cfg.chunks
        owner = cutlass.select_(wraps, owner - cfg.chunks, owner)
        slot = cutlass.select_(wraps, slot + 1, slot)
        at = base + part_offset(cfg, rank, owner, slot) + lane * 16
        shared.st_shared_cluster_v4_f32(cluster.mapa(at, owner), [units[i * 4 + j] for j in range(4)])


def part_offset(cfg: SparseMlaConfig, sender: Int32, owner: Int32, slot: Int32) -> Int32:
    """Where the sender's part of a unit lies in the owner's shared memory; the inbox has no room for its own."""
    row = sender - cutlass.select_(sender > owner, Int32(1), Int32(0))
    theirs = cfg.inbox_at + (row * cfg.unit_slots + slot) * UNIT_BYTES
    return cutlass.select_(sender == owner, cfg.own_at + slot * UNIT_BYTES, theirs)


def push_stats(cfg: SparseMlaConfig, base: Int32, rank: Int32, thread: Int32) -> None:
    """Thread 16 * c + h sends this CTA's (m, l) of head h to CTA c, its own included."""
    head, cta = thread % HEADS, thread // HEADS
    maximum = over_warps(base + cfg.maxima_at, head, largest=True)
    total = over_warps(base + cfg.sums_at, head, largest=False)
    addr = base + cfg.stats_at + (rank * HEADS + head) * 8
    if cfg.chunks > 1:
        addr = cluster.mapa(addr, cutlass.min(cta, Int32(cfg.chunks - 1)))
    shared.st_shared_cluster_v2_f32(addr, (maximum, total), cta < cfg.chunks)


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
    """Adds up and stores this CTA's units; `out` and `lse`: addresses of the first of 16 heads of this token."""
    for turn in cutlass.range(-(-cfg.unit_slots // WARPS), unroll=1):
        slot = turn * WARPS + warp
        unit = slot * cfg.chunks + rank
        wanted = unit < UNITS
        if const_expr(cfg.few_heads):
            wanted = wanted & (unit % 2 == 0)
        if wanted:
            head = lane // 4 + 8 * (unit % 2)
            factors, head_lse = head_weights(cfg, base, head)
            sums = [Float32(0.0)] * 4
            for sender in range_constexpr(cfg.chunks):
                at = base + part_offset(cfg, Int32(sender), rank, slot) + lane * 16
                part = shared.ld_shared_v4_f32(at)
                sums = [a + b * factors[sender] for a, b in zip(sums, part, strict=True)]
            store_unit(cfg, out, unit, [value * out_scale for value in sums], lane)
            store_lse(lse, head, head_lse, (unit < 2) & (lane % 4 == 0))


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
    """As `finish`, for a cluster of one: all units are this CTA's own, in registers."""
    for h in range(1 if cfg.few_heads else 2):
        (factor,), head_lse = head_weights(cfg, base, lane // 4 + 8 * h)
        store_lse(lse, lane // 4 + 8 * h, head_lse, (warp == 0) & (lane % 4 == 0))
        for c in range(4):
            unit = 2 * c + h
            store_unit(cfg, out, warp * 8 + unit, [units[unit * 4 + j] * factor * out_scale for j in range(4)], lane)


def store_unit(cfg: SparseMlaConfig, out: Int64, unit: Int32, values: list[Float32], lane: Int32) -> None:
    """Stores a lane's four outputs of a unit as BF16: 4 dims in a row, or for BF16 values two pairs 8 dims apart."""
    head, dim = lane // 4 + 8 * (unit % 2), unit // 2 * 16
    at = out + Int64(head * 512 + dim) * 2
    low, high = mma.cvt_rn_bf16x2(values[0], values[1]), mma.cvt_rn_bf16x2(values[2], values[3])
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
