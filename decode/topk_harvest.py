# SPDX-License-Identifier: Apache-2.0
"""Collecting the elements that reach the threshold, from the few vectors whose maximum does. Inlined.

Every warp finds the hot ones among the vectors that it read, lists them and reads them again, a lane a vector, from L1
or L2: a few percent of the row. What it keeps it counts at once in all CTAs of the row. No warp waits for another.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr, range_constexpr

from decode.topk_capture import guessed_key, is_whole, kept_names, kept_vectors, num_reached
from decode.topk_config import KEPT, UNROLL, VECTOR_BYTES, VECTOR_COLUMNS, WARP, WINDOW
from decode.topk_exchange import (
    NUM_ABOVE,
    NUM_EQUAL,
    OVERFLOW,
    Bracket,
    count_candidates,
    count_in_lanes,
    counter,
)
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import (
    MAX_KEY,
    Quad,
    Row,
    ld_vector_below,
    marks_above,
    min_u32,
    name_of_vector,
    order_key,
    value_below,
    value_pair,
    vector_address,
    vector_of_name,
)
from nvcomm.ptx import cluster as ptx

MARKED_BATCHES = 4  # whose 8 bits each fill a word of marks


@cute.jit
def harvest(row: Row, bracket: Bracket, num_batches: Int32, tail: Uint32, known: cute.Tensor) -> Int32:
    """Collects this CTA's elements above the threshold, and up to k of those at it, and counts them in the row's CTAs.

    The counters go on past the capacities: an overflow is seen, and nothing is written past the end.

    Returns:
        How many counts this warp has sent to each CTA.
    """
    num_sent = Int32(0)
    num_done = Int32(0)
    if const_expr(row.config.captures):  # noqa: SIM102
        if (num_reached(known) <= KEPT) & (guessed_key(known) <= bracket.threshold):
            num_sent = keep_kept(row, bracket, Int32(num_reached(known)))
            if num_batches > 0:
                num_done = num_batches - Int32(is_whole(row, num_batches - 1) == False)  # noqa: E712
    for first_batch in cutlass.range(num_done, num_batches, MARKED_BATCHES, unroll=1):
        num_sent = num_sent + harvest_batches(row, bracket, first_batch, num_batches)
    if const_expr(row.config.mode == "columns"):  # noqa: SIM102
        if (row.cta == 0) & (row.warp == 0) & (row.num_tail > 0):
            num_sent = num_sent + keep_keys(row, bracket, tail, row.num_vectors * VECTOR_COLUMNS + row.lane)
    return num_sent


@cute.jit
def harvest_batches(row: Row, bracket: Bracket, first_batch: Int32, num_batches: Int32) -> Int32:
    """Collects from up to four batches, in windows of as many vectors as a warp can list."""
    num_sent = Int32(0)
    marks = marks_of_batches(row, value_below(bracket.threshold), first_batch, num_batches)
    count = popc(marks)
    upto = warp_inclusive_sum(count)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    while total > 0:
        marks = list_marked(row, first_batch, marks, upto - count)
        listed = Int32(total)
        if listed > WINDOW:
            listed = Int32(WINDOW)
        num_sent = num_sent + keep_listed(row, bracket, listed)
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
    return num_sent


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


def names_of_warp(row: Row) -> Uint32:
    """Where this warp lists hot vectors, each called step * 32 + lane, where steps count over all batches."""
    return row.smem + Uint32(row.layout.groups) + Uint32(row.warp * WINDOW) * 2


@cute.jit
def list_marked(row: Row, first_batch: Int32, marks: Uint32, at: Uint32) -> Uint32:
    """Lists this thread's marked vectors of four batches at places from `at` to the end of the window.

    Returns:
        The marks that remain.
    """
    first_name = name_of_vector(row, first_batch * UNROLL)
    while (marks != 0) & (at < WINDOW):
        bit = lowest_bit(marks)
        ptx.st_shared_u16(names_of_warp(row) + at * 2, first_name + bit * WARP)
        marks = marks & (marks - 1)
        at = at + 1
    return marks


def lowest_bit(mask: Uint32) -> Uint32:
    """The number of the lowest set bit; there is one."""
    return popc((mask - 1) & (Uint32(0xFFFFFFFF) - mask))


@cute.jit
def keep_listed(row: Row, bracket: Bracket, num_names: Int32) -> Int32:
    """Keeps what reaches the threshold in the vectors that this warp has listed; returns its counts sent per CTA."""
    num_sent = Int32(0)
    cute.arch.sync_warp()
    for first in cutlass.range(0, num_names, WARP, unroll=1):
        i = first + row.lane
        name = Uint32(row.lane)
        if i < num_names:
            name = ptx.ld_shared_u16(names_of_warp(row) + Uint32(i) * 2)
        vector = vector_of_name(row, name)
        # A maximum of -inf may stand for a vector past the end.
        inside = (i < num_names) & (vector < row.num_vectors)
        if const_expr(row.config.mode == "blocks"):
            key = Uint32(0)
            if inside:
                key = maximum_of_name(row, name)
            num_sent = num_sent + keep_keys(row, bracket, key, vector)
        else:
            words = ld_vector_below(vector_address(row, vector), vector, row.num_vectors * Int32(inside))
            num_sent = num_sent + keep_columns(row, bracket, words, vector, inside)
    cute.arch.sync_warp()
    return num_sent


def maximum_of_name(row: Row, name: Uint32) -> Uint32:
    """The key of a vector's maximum."""
    step = name // WARP
    pair = step // UNROLL * row.config.threads + Uint32(row.warp * WARP) + name % WARP
    return order_key(ptx.ld_shared_u16(row.smem + Uint32(row.layout.maxima) + (pair * UNROLL + step % UNROLL) * 2))


@cute.jit
def keep_kept(row: Row, bracket: Bracket, num_kept: Int32) -> Int32:
    """Keeps what reaches the threshold in the vectors kept while streaming; returns the counts sent to each CTA."""
    num_sent = Int32(0)
    for first in cutlass.range(0, num_kept, WARP, unroll=1):
        i = first + row.lane
        name = Uint32(0)
        a = b = c = d = Uint32(0)
        if i < num_kept:
            name = ptx.ld_shared_u16(kept_names(row) + Uint32(i) * 2)
            a, b, c, d = ptx.ld_shared_v4(kept_vectors(row) + Uint32(i) * VECTOR_BYTES)
        vector = vector_of_name(row, name)
        num_sent = num_sent + keep_columns(row, bracket, (a, b, c, d), vector, i < num_kept)
    return num_sent


@cute.jit
def keep_columns(row: Row, bracket: Bracket, words: Quad, vector: Int32, inside: Boolean) -> Int32:
    """Keeps the columns that reach the threshold of a vector a lane, if `inside`."""
    reach = marks_above(words, value_below(bracket.threshold)) * Uint32(inside)
    above = marks_above(words, value_pair(bracket.threshold)) * Uint32(inside & (bracket.threshold != MAX_KEY))
    equal = reach - above
    at_above, at_equal, num_above, num_equal = take_places(row, popc(above), popc(equal))
    at = at_above
    while above != 0:
        bit = lowest_bit(above)
        put_above(row, at, order_key(element(words, bit)), vector * VECTOR_COLUMNS + Int32(bit))
        above = above & (above - 1)
        at = at + 1
    at = at_equal
    while equal != 0:
        put_equal(row, at, vector * VECTOR_COLUMNS + Int32(lowest_bit(equal)))
        equal = equal & (equal - 1)
        at = at + 1
    return count_kept(row, bracket, at_above, at_equal, num_above, num_equal)


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
def keep_keys(row: Row, bracket: Bracket, key: Uint32, index: Int32) -> Int32:
    """Keeps an element a lane if it reaches the threshold; key 0 is no element."""
    is_above = key > bracket.threshold
    is_equal = key == bracket.threshold
    at_above, at_equal, num_above, num_equal = take_places(row, Uint32(is_above), Uint32(is_equal))
    if is_above:
        put_above(row, at_above, key, index)
    if is_equal:
        put_equal(row, at_equal, index)
    return count_kept(row, bracket, at_above, at_equal, num_above, num_equal)


@cute.jit
def take_places(row: Row, above: Uint32, equal: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Takes places in the lists of this CTA, `above` and `equal` for this lane; all lanes take part.

    Returns:
        This lane's first places, and how many the warp has taken.
    """
    packed = above | (equal << Uint32(16))
    upto = warp_inclusive_sum(packed)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    num_above = total & Uint32(0xFFFF)
    num_equal = total >> Uint32(16)
    base = Uint32(0)
    if row.lane < 2:
        # Lane 0 takes places above the threshold, lane 1 at it, from neighbouring counters.
        count = num_above
        if row.lane == 1:
            count = num_equal
        base = ptx.atom_add_shared(counter(row, NUM_ABOVE) + Uint32(row.lane) * 4, count)
    before = upto - packed
    at_above = ptx.shfl_idx(base, Uint32(0)) + (before & Uint32(0xFFFF))
    at_equal = ptx.shfl_idx(base, Uint32(1)) + (before >> Uint32(16))
    return at_above, at_equal, num_above, num_equal


@cute.jit
def count_kept(
    row: Row, bracket: Bracket, at_above: Uint32, at_equal: Uint32, num_above: Uint32, num_equal: Uint32
) -> Int32:
    """Counts what a warp has just kept in all CTAs of the row; its first places are those of lane 0."""
    num_sent = Int32(0)
    capacity = Uint32(row.config.candidate_capacity)
    cute.arch.sync_warp()
    if num_above != 0:
        begin = ptx.shfl_idx(at_above, Uint32(0))
        end = begin + num_above
        if end > capacity:
            count_in_lanes(row, Uint32(row.layout.counters + 4 * OVERFLOW), Uint32(1))
            num_sent = num_sent + 1
        begin = min_u32(begin, capacity)
        end = min_u32(end, capacity)
        count_candidates(row, bracket, begin, end)
        num_sent = num_sent + Int32(end - begin)
    if num_equal != 0:
        begin = ptx.shfl_idx(at_equal, Uint32(0))
        kept = min_u32(begin + num_equal, Uint32(row.config.k)) - min_u32(begin, Uint32(row.config.k))
        if kept != 0:
            offset = Uint32(row.layout.fine) + ((bracket.largest - bracket.threshold) >> bracket.shift) * 4
            count_in_lanes(row, offset, kept)
            num_sent = num_sent + 1
    return num_sent


@cute.jit
def put_above(row: Row, at: Uint32, key: Uint32, index: Int32) -> None:
    """A candidate above the threshold."""
    if at < row.config.candidate_capacity:
        ptx.st_shared(row.smem + Uint32(row.layout.above_index) + at * 4, Uint32(index))
        ptx.st_shared_u16(row.smem + Uint32(row.layout.above_key) + at * 2, key)


@cute.jit
def put_equal(row: Row, at: Uint32, index: Int32) -> None:
    """A candidate at the threshold. No more than k can be wanted: a row of ties costs no more than its scan."""
    if at < row.config.k:
        ptx.st_shared(row.smem + Uint32(row.layout.equal_index) + at * 4, Uint32(index))
