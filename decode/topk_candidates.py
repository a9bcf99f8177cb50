# SPDX-License-Identifier: Apache-2.0
"""Candidates, the elements that reach the threshold: those of a vector held by a lane, others in lists of the CTA.

What is kept is counted by key.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from decode.topk_config import WARP
from decode.topk_exchange import NUM_ABOVE, Bracket, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import order_key
from decode.topk_named import element, load_named, lowest_bit, marks_above_and_at, marks_reaching, names_of_warp
from decode.topk_row import Row
from nvcomm.ptx import cluster as ptx

# What a lane holds: a vector, its elements that reach the threshold, and its number.
HELD_WORDS, HELD_MARKS, HELD_VECTOR, HELD_FIELDS = 0, 4, 5, 6


@cute.jit
def hold_named(row: Row, bracket: Bracket, num_named: Int32) -> cute.Tensor:
    """Reads the named vectors into registers and counts what reaches the threshold in them."""
    held = cute.make_rmem_tensor((HELD_FIELDS,), Uint32)
    for i in range_constexpr(HELD_FIELDS):
        held[i] = Uint32(0)
    if num_named > 0:
        cute.arch.sync_warp()
        words, vector, inside = load_named(row, names_of_warp(row), row.lane, num_named)
        marks = marks_reaching(row, words, bracket.threshold, inside)
        for i in range_constexpr(4):
            held[HELD_WORDS + i] = words[i]
        held[HELD_MARKS] = marks
        held[HELD_VECTOR] = Uint32(vector)
        while marks != 0:
            count_key(row, bracket, order_key(element(words, lowest_bit(marks))))
            marks = marks & (marks - 1)
    return held


def count_key(row: Row, bracket: Bracket, key: Uint32) -> None:
    """Counts a candidate in the fine histogram."""
    ptx.red_add_shared(row.smem + Uint32(row.layout.fine) + bracket.fine_bin(key) * 4, Uint32(1))


@cute.jit
def list_named(row: Row, bracket: Bracket, names: Uint32, num_names: Int32) -> None:
    """Lists what reaches the threshold in the named vectors."""
    cute.arch.sync_warp()
    for first in cutlass.range(0, num_names, WARP, unroll=1):
        words, vector, inside = load_named(row, names, first + row.lane, num_names)
        above, equal = marks_above_and_at(row, words, bracket.threshold, inside)
        at_above, at_equal = take_places(row, counter(row, NUM_ABOVE), popc(above), popc(equal))
        while above != 0:
            bit = lowest_bit(above)
            list_above(row, bracket, at_above, order_key(element(words, bit)), vector * row.elements + Int32(bit))
            above = above & (above - 1)
            at_above = at_above + 1
        while equal != 0:
            list_equal(row, bracket, at_equal, vector * row.elements + Int32(lowest_bit(equal)))
            equal = equal & (equal - 1)
            at_equal = at_equal + 1
    cute.arch.sync_warp()


@cute.jit
def list_keys(row: Row, bracket: Bracket, key: Uint32, index: Int32) -> None:
    """Lists an element a lane if it reaches the threshold; key 0 is no element."""
    is_above = key > bracket.threshold
    is_equal = key == bracket.threshold
    at_above, at_equal = take_places(row, counter(row, NUM_ABOVE), Uint32(is_above), Uint32(is_equal))
    if is_above:
        list_above(row, bracket, at_above, key, index)
    if is_equal:
        list_equal(row, bracket, at_equal, index)


@cute.jit
def take_places(row: Row, counters: Uint32, above: Uint32, equal: Uint32) -> tuple[Uint32, Uint32]:
    """This lane's first places of two kinds, from two neighbouring counters; all lanes take part."""
    packed = above | (equal << Uint32(16))
    upto = warp_inclusive_sum(packed)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    base = Uint32(0)
    if row.lane < 2:
        count = total & Uint32(0xFFFF)
        if row.lane == 1:
            count = total >> Uint32(16)
        base = ptx.atom_add_shared(counters + Uint32(row.lane) * 4, count)
    before = upto - packed
    at_above = ptx.shfl_idx(base, Uint32(0)) + (before & Uint32(0xFFFF))
    at_equal = ptx.shfl_idx(base, Uint32(1)) + (before >> Uint32(16))
    return at_above, at_equal


@cute.jit
def list_above(row: Row, bracket: Bracket, at: Uint32, key: Uint32, index: Int32) -> None:
    """A candidate above the threshold."""
    if at < row.config.candidate_capacity:
        ptx.st_shared(row.smem + Uint32(row.layout.above_index) + at * 4, Uint32(index))
        ptx.st_shared_u16(row.smem + Uint32(row.layout.above_key) + at * 2, key)
        count_key(row, bracket, key)


@cute.jit
def list_equal(row: Row, bracket: Bracket, at: Uint32, index: Int32) -> None:
    """A candidate at the threshold. No more than k can be wanted: a row of ties costs no more than its scan."""
    if at < row.config.k:
        ptx.st_shared(row.smem + Uint32(row.layout.equal_index) + at * 4, Uint32(index))
        count_key(row, bracket, bracket.threshold)
