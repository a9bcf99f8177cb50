# SPDX-License-Identifier: Apache-2.0
"""Collecting the elements that reach the threshold, from the few vectors whose maximum does. Inlined.

Every warp finds the hot ones among the vectors that it read, names them and reads them again, a lane a vector, from L1
or L2. A warp has few: its lanes hold them in registers until the k-th key is known. Only if it has more (bursts, ties)
their elements go to lists of the CTA. Warps do not wait for each other before the end.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import UNROLL, VECTOR_COLUMNS, WARP, WINDOW
from decode.topk_exchange import NUM_ABOVE, NUM_EQUAL, Bracket, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import (
    MAX_KEY,
    NEG_INF_PAIR,
    Quad,
    Row,
    ld_vector_below,
    marks_above,
    order_key,
    value_below,
    value_pair,
    vector_address,
    vector_of_name,
)
from nvcomm.ptx import cluster as ptx

MARKED_BATCHES = 4  # whose 8 bits each fill a word of marks
FEW_STEPS = 4  # a row of so few steps is named without a sum over the lanes

# What a lane holds: a vector, its elements that reach the threshold, and its number.
HELD_WORDS, HELD_MARKS, HELD_VECTOR, HELD_FIELDS = 0, 4, 5, 6


@cute.jit
def harvest(row: Row, bracket: Bracket, num_batches: Int32, tail: Uint32) -> cute.Tensor:
    """Finds this CTA's elements that reach the threshold, and counts them in its fine histogram.

    The counters of the lists go on past their capacities: an overflow is seen, and nothing is written past the end.

    Returns:
        What this lane holds.
    """
    num_named = Int32(0)
    if row.num_vectors <= FEW_STEPS * row.config.step_vectors:
        num_named = name_few(row, bracket)
    else:
        for first_batch in cutlass.range(0, num_batches, MARKED_BATCHES, unroll=1):
            num_named = name_batches(row, bracket, first_batch, num_batches, num_named)
    held = hold_named(row, bracket, num_named)
    if const_expr(row.config.mode == "columns"):  # noqa: SIM102
        if (row.cta == 0) & (row.warp == 0) & (row.num_tail > 0):
            list_keys(row, bracket, tail, row.num_vectors * VECTOR_COLUMNS + row.lane)
    return held


def names_of_warp(row: Row) -> Uint32:
    """Where this warp names hot vectors (see `vector_of_name`); the first places are for those that it holds."""
    return row.smem + Uint32(row.layout.groups) + Uint32(row.warp * (WARP + WINDOW)) * 2


@cute.jit
def name_few(row: Row, bracket: Bracket) -> Int32:
    """Names the hot vectors of the first four steps, to be held as far as there are registers, else lists them."""
    marks = marks_of_batches(row, value_below(bracket.threshold), Int32(0), Int32(1))
    lanes_below = (Uint32(1) << Uint32(row.lane)) - 1
    total = Uint32(0)
    for step in range_constexpr(FEW_STEPS):
        is_marked = (marks & Uint32(1 << step)) != 0
        lanes = ptx.ballot(is_marked)
        if is_marked:
            at = total + popc(lanes & lanes_below)
            ptx.st_shared_u16(names_of_warp(row) + at * 2, Uint32(step * WARP) + Uint32(row.lane))
        total = total + popc(lanes)
    num_named = Int32(total)
    if num_named > row.config.held_vectors:
        list_named(row, bracket, names_of_warp(row), num_named)
        num_named = Int32(0)
    return num_named


@cute.jit
def name_batches(row: Row, bracket: Bracket, first_batch: Int32, num_batches: Int32, num_named: Int32) -> Int32:
    """Names the hot vectors of up to four batches behind `num_named` others to be held, or lists them.

    Returns:
        How many have names to be held.
    """
    marks = marks_of_batches(row, value_below(bracket.threshold), first_batch, num_batches)
    count = popc(marks)
    upto = warp_inclusive_sum(count)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    if num_named + Int32(total) <= row.config.held_vectors:
        name_marked(row, first_batch, names_of_warp(row), marks, Uint32(num_named) + upto - count)
        num_named = num_named + Int32(total)
    else:
        window = names_of_warp(row) + 2 * WARP
        while total > 0:
            marks = name_marked(row, first_batch, window, marks, upto - count)
            listed = Int32(total)
            if listed > WINDOW:
                listed = Int32(WINDOW)
            list_named(row, bracket, window, listed)
            if total > WINDOW:
                # A row of ties: once there are k of them, only vectors with something above are worth a look.
                if ptx.ld_shared(counter(row, NUM_EQUAL)) >= row.config.k:
                    strict = marks_of_batches(row, value_pair(bracket.threshold), first_batch, num_batches)
                    marks = marks & (strict * Uint32(bracket.threshold != MAX_KEY))
                count = popc(marks)
                upto = warp_inclusive_sum(count)
                total = ptx.shfl_idx(upto, Uint32(WARP - 1))
            else:
                total = Uint32(0)
    return num_named


@cute.jit
def marks_of_batches(row: Row, bound: Uint32, first_batch: Int32, num_batches: Int32) -> Uint32:
    """8 bits for each of four of this thread's batches: vectors whose maximum is above `bound`."""
    marks = Uint32(0)
    for i in range_constexpr(min(MARKED_BATCHES, row.config.batches)):
        if first_batch + i < num_batches:
            pair = (first_batch + i) * row.config.threads + row.thread
            steps = ptx.ld_shared_v4(row.smem + Uint32(row.layout.maxima) + Uint32(pair) * 16)
            marks = marks | (marks_above(steps, bound) << Uint32(UNROLL * i))
    return marks


@cute.jit
def name_marked(row: Row, first_batch: Int32, names: Uint32, marks: Uint32, at: Uint32) -> Uint32:
    """Writes the names of this thread's marked vectors of four batches to places from `at` to the end of the window.

    Returns:
        The marks that remain.
    """
    first_name = Uint32(first_batch * (UNROLL * WARP) + row.lane)
    while (marks != 0) & (at < WINDOW):
        ptx.st_shared_u16(names + at * 2, first_name + lowest_bit(marks) * WARP)
        marks = marks & (marks - 1)
        at = at + 1
    return marks


def lowest_bit(mask: Uint32) -> Uint32:
    """The number of the lowest set bit; there is one."""
    return popc((mask - 1) & (Uint32(0xFFFFFFFF) - mask))


@cute.jit
def load_named(row: Row, names: Uint32, i: Int32, num_names: Int32) -> tuple[Quad, Int32, Boolean]:
    """The words of vector i of those named, its number, and whether there is one. In block mode its maximum alone."""
    name = Uint32(row.lane)
    if i < num_names:
        name = ptx.ld_shared_u16(names + Uint32(i) * 2)
    vector = vector_of_name(row, name)
    # A maximum of -inf may stand for a vector past the end.
    inside = (i < num_names) & (vector < row.num_vectors)
    if const_expr(row.config.mode == "blocks"):
        words = (maximum_of_name(row, name, inside), *[Uint32(0)] * 3)
    else:
        words = ld_vector_below(vector_address(row, vector), vector, row.num_vectors * Int32(inside))
    return words, vector, inside


@cute.jit
def maximum_of_name(row: Row, name: Uint32, inside: Boolean) -> Uint32:
    """A vector's maximum as the low half of a word whose high half is -inf."""
    bits = Uint32(NEG_INF_PAIR & 0xFFFF)
    if inside:
        step = name // WARP
        pair = step // UNROLL * row.config.threads + Uint32(row.warp * WARP) + name % WARP
        bits = ptx.ld_shared_u16(row.smem + Uint32(row.layout.maxima) + (pair * UNROLL + step % UNROLL) * 2)
    return bits | Uint32(NEG_INF_PAIR & 0xFFFF0000)


def marks_reaching(row: Row, words: Quad, key: Uint32, inside: Boolean) -> Uint32:
    """A bit for each element of a vector that is not below `key`."""
    pairs = words[:1] if row.config.mode == "blocks" else words
    return marks_above(pairs, value_below(key)) & (Uint32((1 << row.elements) - 1) * Uint32(inside))


def marks_above_and_at(row: Row, words: Quad, key: Uint32, inside: Boolean) -> tuple[Uint32, Uint32]:
    """A bit for each element of a vector that is above `key`, and for each that is equal to it."""
    pairs = words[:1] if row.config.mode == "blocks" else words
    reach = marks_reaching(row, words, key, inside)
    # The comparison holds for NaN on either side, but nothing is above NaN.
    above = marks_above(pairs, value_pair(key)) & (reach * Uint32(key != MAX_KEY))
    return above, reach - above


@cute.jit
def element(words: Quad, i: Uint32) -> Uint32:
    """BF16 i of a vector."""
    a, b, c, d = words
    if i >= 4:
        a = c
        b = d
    if (i & 2) != 0:
        a = b
    return (a >> ((i & 1) * 16)) & Uint32(0xFFFF)


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
