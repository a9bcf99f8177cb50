# SPDX-License-Identifier: Apache-2.0
"""From the histogram of all candidates to the k-th key, and to this CTA's places in the output. Inlined."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from decode.topk_config import FINE_BINS, FINEST_BINS, WARP
from decode.topk_exchange import AT_ABOVE, AT_EQUAL, Bracket, cluster_sync, counter
from decode.topk_find import LOW, find_bin, popc
from decode.topk_keys import MIN_KEY, Row
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory


@cute.jit
def find_kth(row: Row, bracket: Bracket, num_above: Int32, num_equal: Int32) -> tuple[Uint32, Uint32, Uint32]:
    """The k-th largest key of the row; the same for all CTAs of the cluster.

    Args:
        row: the row.
        bracket: of the row.
        num_above: candidates above the threshold in this CTA.
        num_equal: candidates at the threshold in this CTA.

    Returns:
        The key, the packed count of candidates above it, and of those at it.
    """
    found, above, count = find_bin(row, row.layout.fine, FINE_BINS, row.num_select, True)
    kth = bracket.largest - found
    if bracket.shift != 0:
        kth, above, count = refine(row, bracket, found, above, num_above, num_equal)
    return kth, above, count


@cute.jit
def refine(
    row: Row, bracket: Bracket, fine_bin: Uint32, bin_above: Uint32, num_above: Int32, num_equal: Int32
) -> tuple[Uint32, Uint32, Uint32]:
    """`find_kth` inside a bin of the fine histogram that has several keys; `bin_above` counts before it."""
    config, layout = row.config, row.layout
    largest = bracket.largest - (fine_bin << bracket.shift)
    unit = row.thread
    while unit < num_above * config.cluster:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit // config.cluster) * 2)
        if ((bracket.largest - key) >> bracket.shift) == fine_bin:
            add_everywhere(row, Uint32(layout.finest) + (largest - key) * 4, unit % config.cluster, Uint32(1))
        unit = unit + config.threads
    if (row.thread < config.cluster) & (((bracket.largest - bracket.threshold) >> bracket.shift) == fine_bin):
        offset = Uint32(layout.finest) + (largest - bracket.threshold) * 4
        add_everywhere(row, offset, row.thread, Uint32(num_equal))
    cluster_sync(row)
    target = row.num_select - (bin_above & Uint32(LOW))
    found, above, count = find_bin(row, layout.finest, FINEST_BINS, target, True)
    return largest - found, bin_above + above, count


def add_everywhere(row: Row, offset: Uint32, dst: Int32, count: Uint32) -> None:
    """Adds `count` to the word at `offset` of CTA `dst`: low half for all, high half if this CTA comes before it."""
    before = Uint32(row.cta < dst) << Uint32(16)
    ptx.red_add_shared_cluster(ptx.mapa(row.smem + offset, Uint32(dst)), count * (before + 1))


def has_work(row: Row, bracket: Bracket, num_above: Int32, num_equal: Int32) -> Boolean:
    """Whether a warp has candidates to write, or takes part in what all warps do together."""
    if row.config.deterministic or row.config.mode == "blocks":
        return Boolean(True)
    first = row.warp * WARP
    return (first < num_above) | (first < num_equal) | (bracket.shift != 0)


@cute.jit
def emit(
    row: Row, threshold: Uint32, kth: Uint32, above: Uint32, count: Uint32, num_above: Int32, num_equal: Int32
) -> None:
    """Writes this CTA's selected indices: those above the k-th key from the front, those at it behind all of them."""
    layout = row.layout
    above_at = above >> Uint32(16)
    equal_at = (above & Uint32(LOW)) + (count >> Uint32(16))
    end = row.num_select
    if const_expr(row.config.mode == "blocks"):  # noqa: SIM102
        # A block of -inf alone is padding, not a choice.
        if kth == MIN_KEY:
            end = Uint32(0)
    first = row.warp * WARP
    while first < num_above:
        unit = first + row.lane
        key = Uint32(0)
        index = Uint32(0)
        if unit < num_above:
            key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit) * 2)
            index = ptx.ld_shared(row.smem + Uint32(layout.above_index) + Uint32(unit) * 4)
        put_in_warp(row, key > kth, above_at, AT_ABOVE, row.num_select, index)
        put_in_warp(row, (key == kth) & (unit < num_above), equal_at, AT_EQUAL, end, index)
        first = first + row.config.threads
    if kth == threshold:
        unit = row.thread
        while unit < num_equal:
            at = equal_at + Uint32(unit)
            if at < end:
                put(row, at, ptx.ld_shared(row.smem + Uint32(layout.equal_index) + Uint32(unit) * 4))
            unit = unit + row.config.threads


@cute.jit
def put_in_warp(row: Row, chosen: Boolean, begin: Uint32, which: int, end: Uint32, index: Uint32) -> None:
    """The chosen lanes' indices to the next places from `begin` on, as far as they lie before `end`."""
    lanes = ptx.ballot(chosen)
    if lanes != 0:
        base = Uint32(0)
        if row.lane == 0:
            base = ptx.atom_add_shared(counter(row, which), popc(lanes))
        at = begin + ptx.shfl_idx(base, Uint32(0)) + popc(lanes & ptx.lanes_below())
        if chosen & (at < end):
            put(row, at, index)


def put(row: Row, at: Uint32, index: Uint32) -> None:
    """One selected index to its place in the output."""
    memory.st_weak_b32(row.out + Int64(at) * 4, index)
