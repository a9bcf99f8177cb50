# SPDX-License-Identifier: Apache-2.0
"""From the histogram of all candidates to the k-th key, and to this CTA's places in the output. Inlined."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from decode.topk_config import FINEST_BINS, WARP
from decode.topk_exchange import AT_ABOVE, AT_EQUAL, cluster_sync, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import MIN_KEY, Row
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory

LOW = 0xFFFF
BINS_AT_ONCE = 4 * WARP


@cute.jit
def find_fine(row: Row, offset: int, num_bins: Int32, target: Uint32) -> tuple[Uint32, Uint32, Uint32]:
    """The bin where the running count from the top reaches `target`, by a warp on its own, 128 bins at once.

    Args:
        row: the row.
        offset: of a histogram of packed counts, of which the low half decides.
        num_bins: bins in use, a multiple of 128; the rest is 0.
        target: at least 1, at most the total.

    Returns:
        The bin, and packed the count in the bins above it and its own.
    """
    first = num_bins - BINS_AT_ONCE
    above = Uint32(0)
    piece = load_piece(row, offset, first)
    upto = warp_inclusive_sum(piece[0] + piece[1] + piece[2] + piece[3])
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    while ((above + total) & Uint32(LOW)) < target:
        above = above + total
        first = first - BINS_AT_ONCE
        piece = load_piece(row, offset, first)
        upto = warp_inclusive_sum(piece[0] + piece[1] + piece[2] + piece[3])
        total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    holder = popc(ptx.ballot(((above + upto) & Uint32(LOW)) < target))
    a, b, c, d = piece
    a = ptx.shfl_idx(a, holder)
    b = ptx.shfl_idx(b, holder)
    c = ptx.shfl_idx(c, holder)
    d = ptx.shfl_idx(d, holder)
    above = above + ptx.shfl_idx(upto, holder) - (a + b + c + d)
    found = Uint32(first) + Uint32(BINS_AT_ONCE - 1) - holder * 4
    count = a
    if ((above + count) & Uint32(LOW)) < target:
        above = above + count
        found = found - 1
        count = b
    if ((above + count) & Uint32(LOW)) < target:
        above = above + count
        found = found - 1
        count = c
    if ((above + count) & Uint32(LOW)) < target:
        above = above + count
        found = found - 1
        count = d
    return found, above, count


def load_piece(row: Row, offset: int, first: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """This lane's four of 128 bins from `first` on, counted from the top; the largest bin comes first."""
    at = row.smem + Uint32(offset) + Uint32(first + BINS_AT_ONCE - 4 - 4 * row.lane) * 4
    d, c, b, a = ptx.ld_shared_v4(at)
    return a, b, c, d


@cute.jit
def refine(
    row: Row, low: Uint32, bin_above: Uint32, shift: Uint32, num_above: Int32, equal_here: Uint32
) -> tuple[Uint32, Uint32, Uint32]:
    """Finds the k-th largest key inside a bin of 2^shift keys from `low` on; the same for all CTAs of the cluster.

    Args:
        row: the row.
        low: smallest key of the bin.
        bin_above: packed count above the bin.
        shift: 1 to 6.
        num_above: candidates above the threshold in this CTA.
        equal_here: this CTA's elements at the threshold, if the threshold is `low`, else 0.

    Returns:
        The key, the packed count above it, and its packed own.
    """
    config, layout = row.config, row.layout
    unit = row.thread
    while unit < num_above * config.cluster:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit // config.cluster) * 2)
        if ((key - low) >> shift) == 0:
            add_everywhere(row, Uint32(layout.finest) + (key - low) * 4, unit % config.cluster, Uint32(1))
        unit = unit + config.threads
    if row.thread < config.cluster:
        add_everywhere(row, Uint32(layout.finest), row.thread, equal_here)
    cluster_sync(row)
    target = row.num_select - (bin_above & Uint32(LOW))
    found, above, count = find_fine(row, layout.finest, Int32(FINEST_BINS), target)
    return low + found, bin_above + above, count


def add_everywhere(row: Row, offset: Uint32, dst: Int32, count: Uint32) -> None:
    """Adds `count` to the word at `offset` of CTA `dst`: low half for all, high half if this CTA comes before it."""
    before = Uint32(row.cta < dst) << Uint32(16)
    ptx.red_add_shared_cluster(ptx.mapa(row.smem + offset, Uint32(dst)), count * (before + 1))


def bins_in_use(threshold: Uint32, largest: Uint32, shift: Uint32) -> Int32:
    """Bins of the fine histogram up to the largest key, rounded up to what a warp reads at once."""
    used = Int32((largest - threshold) >> shift) + 1
    return (used + BINS_AT_ONCE - 1) // BINS_AT_ONCE * BINS_AT_ONCE


def has_work(row: Row, num_above: Int32, num_equal: Int32, shift: Uint32) -> Boolean:
    """Whether a warp has candidates to write, or takes part in what all warps do together."""
    if row.config.deterministic or row.config.mode == "blocks":
        return Boolean(True)
    first = row.warp * WARP
    return (first < num_above) | (first < num_equal) | (shift != 0)


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
    unit = row.thread
    while unit < num_above:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit) * 2)
        if key >= kth:
            index = ptx.ld_shared(row.smem + Uint32(layout.above_index) + Uint32(unit) * 4)
            if key > kth:
                put(row, above_at + ptx.atom_add_shared(counter(row, AT_ABOVE), Uint32(1)), index)
            else:
                at = equal_at + ptx.atom_add_shared(counter(row, AT_EQUAL), Uint32(1))
                if at < end:
                    put(row, at, index)
        unit = unit + row.config.threads
    if kth == threshold:
        unit = row.thread
        while unit < num_equal:
            at = equal_at + Uint32(unit)
            if at < end:
                put(row, at, ptx.ld_shared(row.smem + Uint32(layout.equal_index) + Uint32(unit) * 4))
            unit = unit + row.config.threads


def put(row: Row, at: Uint32, index: Uint32) -> None:
    """One selected index to its place in the output."""
    memory.st_weak_b32(row.out + Int64(at) * 4, index)
