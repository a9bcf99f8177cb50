# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: softmax over a CTA's 128 columns, and the merge of a token's partial outputs over its cluster.

Every CTA finishes 1 / chunks of the output. The others push the units it needs, unnormalised, straight into its inbox,
and their (m, l) into its stats; one cluster barrier later everything it reads is its own, so it may exit when done.
Exponents are base 2; l is relative to m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from decode.sparse_mla_layout import HEADS, UNIT_BYTES, WARPS, SparseMlaConfig
from nvcomm.ptx import cluster, memory, mma, shared

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


def quad_reduce(value: Float32, largest: bool) -> Float32:
    """Maximum or sum over the 4 lanes that hold one head's columns."""
    for offset in (1, 2):
        other = cute.arch.shuffle_sync_bfly(value, offset=offset)
        value = cute.arch.fmax(value, other) if largest else value + other
    return value


def over_warps(table: Int32, head: Int32, largest: bool) -> Float32:
    """Maximum or sum of a head's 8 entries of a table."""
    near = shared.ld_shared_v4_f32(table + head * (WARPS * 4))
    far = shared.ld_shared_v4_f32(table + head * (WARPS * 4) + 16)
    values = [*near, *far]
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [cute.arch.fmax(a, b) if largest else a + b for a, b in pairs]
    return values[0]


def finite(maximum: Float32) -> Float32:
    """What to subtract: -inf means no active column, and -inf - -inf would be NaN."""
    return cutlass.select_(maximum == Float32(-float("inf")), Float32(0.0), maximum)


def push(cfg: SparseMlaConfig, base: Int32, units: cute.Tensor, rank: Int32, warp: Int32, lane: Int32) -> None:
    """Sends every unit of this warp to the CTA that finishes it."""
    for i in range(2 * 4):
        if cfg.few_heads and i % 2:
            continue
        unit = warp * 8 + i
        owner = unit % cfg.chunks
        # Senders are numbered without the owner.
        sender = rank - cutlass.select_(rank > owner, Int32(1), Int32(0))
        at = cfg.inbox_at + (sender * cfg.unit_slots + unit // cfg.chunks) * UNIT_BYTES + lane * 16
        values = [units[i * 4 + j] for j in range(4)]
        shared.st_shared_cluster_v4_f32(cluster.mapa(base + at, owner), values, owner != rank)


def push_stats(cfg: SparseMlaConfig, base: Int32, rank: Int32, thread: Int32) -> None:
    """Thread 16 * c + h sends this CTA's (m, l) of head h to CTA c, its own included."""
    head, cta = thread % HEADS, thread // HEADS
    maximum = over_warps(base + cfg.maxima_at, head, largest=True)
    total = over_warps(base + cfg.sums_at, head, largest=False)
    addr = base + cfg.stats_at + (rank * HEADS + head) * 8
    if cfg.chunks > 1:
        addr = cluster.mapa(addr, cutlass.min(cta, Int32(cfg.chunks - 1)))
    shared.st_shared_cluster_v2_f32(addr, (maximum, total), cta < cfg.chunks)


def head_weights(
    cfg: SparseMlaConfig, base: Int32, head: Int32, sink: Float32 | None
) -> tuple[list[Float32], Float32, Float32]:
    """What every CTA's partial output of a head counts for.

    Args:
        cfg: compile-time facts.
        base: address of this CTA's shared memory.
        head: 0 to 15.
        sink: of the head, times log2(e), if there is one.

    Returns:
        The factor of each CTA's partial output, the overall maximum, the overall sum without the sink.
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
    if sink is not None:
        divisor = total + mma.ex2(sink - shift)
    inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), Float32(1.0) / divisor)
    return [factor * inverse for factor in factors], maximum, total


def natural_lse(maximum: Float32, total: Float32) -> Float32:
    """Natural log of the sum of exponentials, without the sink; +inf for no active column."""
    lse = (maximum + mma.lg2(total)) * Float32(LN2)
    return cutlass.select_(total == Float32(0.0), Float32(float("inf")), lse)


def merged_unit(
    cfg: SparseMlaConfig, base: Int32, own: list[Float32], factors: list[Float32], rank: Int32, unit: Int32, lane: Int32
) -> list[Float32]:
    """Four outputs of a unit of this CTA: its own partial sums and those of its inbox."""
    scale = pick(factors, rank)
    sums = [value * scale for value in own]
    for sender in range(cfg.chunks - 1):
        at = cfg.inbox_at + (sender * cfg.unit_slots + unit // cfg.chunks) * UNIT_BYTES + lane * 16
        part = shared.ld_shared_v4_f32(base + at)
        scale = cutlass.select_(rank <= sender, factors[sender + 1], factors[sender])
        sums = [a + b * scale for a, b in zip(sums, part, strict=True)]
    return sums


def pick(values: list[Float32], index: Int32) -> Float32:
    """values[index] of values in registers."""
    picked = values[0]
    for i in range(1, len(values)):
        picked = cutlass.select_(index == i, values[i], picked)
    return picked


@cute.jit
def store_unit(
    out: Int64,
    unit: cutlass.Constexpr,
    values: list,
    rank_owns: Boolean,
    warp: Int32,
    lane: Int32,
    interleaved: Boolean,
) -> None:
    """Stores a lane's four outputs as BF16.

    Args:
        out: address of the first of 16 heads of this token.
        unit: 0 to 7 of this warp.
        values: the four outputs.
        rank_owns: whether this CTA stores them.
        warp: of the CTA.
        lane: of the warp.
        interleaved: whether the four are dims (0, 1, 8, 9) + 2(lane%4) rather than (0, 1, 2, 3) + 4(lane%4).
    """
    head = lane // 4 + 8 * (unit % 2)
    at = out + Int64(head * 512 + warp * 64 + (unit // 2) * 16) * 2
    low = mma.cvt_rn_bf16x2(values[0], values[1])
    high = mma.cvt_rn_bf16x2(values[2], values[3])
    if rank_owns:
        if interleaved:
            memory.st_weak_b32(at + Int64(lane % 4) * 4, low)
            memory.st_weak_b32(at + Int64(lane % 4) * 4 + 16, high)
        else:
            cute.arch.inline_ptx(
                "st.global.v2.b32 [{$r0}], {{$r1},{$r2}};", read_only_args=[at + Int64(lane % 4) * 8, low, high]
            )
