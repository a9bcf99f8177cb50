# SPDX-License-Identifier: Apache-2.0
"""From the histogram of all candidates to the k-th key, and to this CTA's places in the output. Inlined."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from decode.topk_candidates import HELD_MARKS, HELD_VECTOR, HELD_WORDS, take_places
from decode.topk_config import FINE_BINS, FINEST_BINS, WARP
from decode.topk_exchange import (
    AT_ABOVE,
    BINS_OF_STORE,
    NUM_ABOVE,
    NUM_EQUAL,
    Bracket,
    cluster_sync,
    counter,
    wait_for_counts,
)
from decode.topk_find import LOW, find_bin, load_received, load_words, popc
from decode.topk_keys import MIN_KEY, min_u32, order_key
from decode.topk_named import element, lowest_bit, marks_above_and_at
from decode.topk_row import Quad, Row
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory


@cute.jit
def find_kth(row: Row, bracket: Bracket, held: cute.Tensor) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """The k-th largest key of the row; the same for all CTAs of the cluster.

    Warp 0 waits and looks, the others wait for warp 0: that is faster than if all of them looked.

    Returns:
        The key, the packed count of candidates above it, and of those at it; and whether any of that is wrong, because
        a list has overflowed.
    """
    result = row.smem + Uint32(row.layout.result)
    if row.warp == 0:
        overflow = wait_for_counts(row)
        if const_expr(row.config.cluster == 1):
            found, above, count = find_bin(row, load_words, row.layout.fine, FINE_BINS, row.num_select)
        else:
            num_stores = bracket.fine_bin(bracket.threshold) // BINS_OF_STORE + 1
            found, above, count = find_bin(row, load_received, num_stores, FINE_BINS, row.num_select)
        if row.lane == 0:
            ptx.st_shared_v4(result, (found, above, count, overflow))
    cute.arch.sync_threads()
    found, above, count, overflow = ptx.ld_shared_v4(result)
    kth = bracket.largest - found
    if (bracket.shift != 0) & (overflow == 0):
        kth, above, count = refine(row, bracket, held, found, above)
    return kth, above, count, overflow


@cute.jit
def refine(
    row: Row, bracket: Bracket, held: cute.Tensor, fine_bin: Uint32, bin_above: Uint32
) -> tuple[Uint32, Uint32, Uint32]:
    """`find_kth` inside a bin of the fine histogram that has several keys; `bin_above` counts before it."""
    layout = row.layout
    marks = held[HELD_MARKS]
    while marks != 0:
        refine_key(row, bracket, order_key(element(held_words(held), lowest_bit(marks))), fine_bin, Uint32(1))
        marks = marks & (marks - 1)
    unit = row.thread
    while unit < num_listed_above(row):
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit) * 2)
        refine_key(row, bracket, key, fine_bin, Uint32(1))
        unit = unit + row.config.threads
    if row.thread == 0:
        refine_key(row, bracket, bracket.threshold, fine_bin, Uint32(num_listed_equal(row)))
    cluster_sync(row)
    target = row.num_select - (bin_above & Uint32(LOW))
    found, above, count = find_bin(row, load_words, layout.finest, FINEST_BINS, target)
    return bracket.largest - (fine_bin << bracket.shift) - found, bin_above + above, count


@cute.jit
def refine_key(row: Row, bracket: Bracket, key: Uint32, fine_bin: Uint32, count: Uint32) -> None:
    """Counts a key of that fine bin in all CTAs: low half for all, high half for those that this CTA comes before."""
    if bracket.fine_bin(key) == fine_bin:
        offset = Uint32(row.layout.finest) + (bracket.largest - (fine_bin << bracket.shift) - key) * 4
        for dst in range(row.config.cluster):
            before = Uint32(row.cta < dst) << Uint32(16)
            ptx.red_add_shared_cluster(ptx.mapa(row.smem + offset, Uint32(dst)), count * (before + 1))


def num_listed_above(row: Row) -> Int32:
    """Candidates above the threshold in the list of this CTA."""
    return Int32(min_u32(ptx.ld_shared(counter(row, NUM_ABOVE)), Uint32(row.config.candidate_capacity)))


def num_listed_equal(row: Row) -> Int32:
    """Candidates at the threshold in the list of this CTA."""
    return Int32(min_u32(ptx.ld_shared(counter(row, NUM_EQUAL)), Uint32(row.config.k)))


def held_words(held: cute.Tensor) -> Quad:
    """The vector that this lane holds."""
    return held[HELD_WORDS], held[HELD_WORDS + 1], held[HELD_WORDS + 2], held[HELD_WORDS + 3]


@cute.jit
def emit(row: Row, threshold: Uint32, held: cute.Tensor, kth: Uint32, above: Uint32, count: Uint32) -> None:
    """Writes this CTA's selected indices: those above the k-th key from the front, those at it behind all of them.

    Args:
        row: the row.
        threshold: listed candidates above it are in one list, those at it in the other.
        held: what this lane holds.
        kth, above, count: from `find_kth`.
    """
    above_at = above >> Uint32(16)
    equal_at = (above & Uint32(LOW)) + (count >> Uint32(16))
    end = row.num_select
    if const_expr(row.config.mode == "blocks"):  # noqa: SIM102
        # A block of -inf alone is padding, not a choice.
        if kth == MIN_KEY:
            end = Uint32(0)
    emit_held(row, held, kth, above_at, equal_at, end)
    num_above = num_listed_above(row)
    first = row.warp * WARP
    while first < num_above:
        unit = first + row.lane
        key = Uint32(0)
        index = Uint32(0)
        if unit < num_above:
            key = ptx.ld_shared_u16(row.smem + Uint32(row.layout.above_key) + Uint32(unit) * 2)
            index = ptx.ld_shared(row.smem + Uint32(row.layout.above_index) + Uint32(unit) * 4)
        emit_listed(row, Uint32(key > kth), Uint32(key == kth), index, above_at, equal_at, end)
        first = first + row.config.threads
    if kth == threshold:
        num_equal = num_listed_equal(row)
        first = row.warp * WARP
        while first < num_equal:
            unit = first + row.lane
            index = Uint32(0)
            if unit < num_equal:
                index = ptx.ld_shared(row.smem + Uint32(row.layout.equal_index) + Uint32(unit) * 4)
            emit_listed(row, Uint32(0), Uint32(unit < num_equal), index, above_at, equal_at, end)
            first = first + row.config.threads


@cute.jit
def emit_held(row: Row, held: cute.Tensor, kth: Uint32, above_at: Uint32, equal_at: Uint32, end: Uint32) -> None:
    """Writes what is selected of the vectors that this warp holds."""
    if ptx.ballot(held[HELD_MARKS] != 0) != 0:
        above, equal = marks_above_and_at(row, held_words(held), kth, held[HELD_MARKS] != 0)
        my_above, my_equal = take_places(row, counter(row, AT_ABOVE), popc(above), popc(equal))
        first = held[HELD_VECTOR] * row.elements
        at = above_at + my_above
        while above != 0:
            put(row, at, first + lowest_bit(above))
            above = above & (above - 1)
            at = at + 1
        at = equal_at + my_equal
        while (equal != 0) & (at < end):
            put(row, at, first + lowest_bit(equal))
            equal = equal & (equal - 1)
            at = at + 1


@cute.jit
def emit_listed(
    row: Row, above: Uint32, equal: Uint32, index: Uint32, above_at: Uint32, equal_at: Uint32, end: Uint32
) -> None:
    """Writes a listed candidate a lane, if `above` or `equal` is 1."""
    my_above, my_equal = take_places(row, counter(row, AT_ABOVE), above, equal)
    if above != 0:
        put(row, above_at + my_above, index)
    if (equal != 0) & (equal_at + my_equal < end):
        put(row, equal_at + my_equal, index)


def put(row: Row, at: Uint32, index: Uint32) -> None:
    """One selected index to its place in the output."""
    memory.st_weak_b32(row.out + Int64(at) * 4, index)
