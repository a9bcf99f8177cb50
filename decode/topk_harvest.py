# SPDX-License-Identifier: Apache-2.0
"""Collecting the elements that reach the threshold, from the few vectors whose maximum does. Inlined.

Every warp finds the hot ones among the vectors that it read, names them and reads them again, a lane a vector, from L1
or L2. A warp has few: its lanes hold them in registers until the k-th key is known. Only if it has more (bursts, ties)
their elements go to lists of the CTA. Warps do not wait for each other before the end.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_candidates import hold_named, list_keys, list_named
from decode.topk_config import UNROLL, VECTOR_COLUMNS, WARP, WINDOW
from decode.topk_exchange import NUM_EQUAL, Bracket, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import MAX_KEY, marks_above, value_below, value_pair
from decode.topk_named import lowest_bit, names_of_warp
from decode.topk_row import Row
from nvcomm.ptx import cluster as ptx

MARKED_BATCHES = 4  # whose 8 bits each fill a word of marks
FEW_STEPS = 4  # a row of so few steps is named without a sum over the lanes


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
