# SPDX-License-Identifier: Apache-2.0
"""Collecting the elements that reach the threshold, from the few vectors whose maximum does. Inlined.

Every warp finds the hot ones among the vectors that it read, lists them and reads them again, from L1 or L2: a few
percent of the row. Warps do not wait for each other before the end.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import HARVEST_BATCHES, UNROLL, VECTOR_COLUMNS, WARP, WINDOW
from decode.topk_exchange import NUM_ABOVE, NUM_EQUAL, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import MAX_KEY, Row, column_key_if, marks_of_steps, order_key, value_pair, vector_at
from nvcomm.ptx import cluster as ptx

VECTORS_AT_ONCE = WARP // VECTOR_COLUMNS
LOADS_IN_FLIGHT = 4


@cute.jit
def harvest(row: Row, threshold: Uint32, num_batches: Int32, tail: Uint32) -> None:
    """Collects this CTA's elements above the threshold, and up to k of those at it, in shared memory.

    The counters go on past the capacities: an overflow is seen, and nothing is written past the end.
    """
    for first_batch in cutlass.range(0, num_batches, HARVEST_BATCHES, unroll=1):
        marks = marks_of_batches(row, threshold, first_batch, num_batches, False)
        count = popc(marks)
        upto = warp_inclusive_sum(count)
        total = ptx.shfl_idx(upto, Uint32(WARP - 1))
        while total > 0:
            marks = harvest_window(row, threshold, first_batch, marks, upto - count, total)
            if total > WINDOW:
                # A row of ties: once there are k of them, only vectors with something above are worth a look.
                if ptx.ld_shared(counter(row, NUM_EQUAL)) >= row.config.k:
                    marks = marks & marks_of_batches(row, threshold, first_batch, num_batches, True)
                count = popc(marks)
                upto = warp_inclusive_sum(count)
                total = ptx.shfl_idx(upto, Uint32(WARP - 1))
            else:
                total = Uint32(0)
    if const_expr(row.config.mode == "columns"):  # noqa: SIM102
        if (row.cta == 0) & (row.warp == 0) & (row.num_tail > 0):
            keep_in_warp(row, tail, row.num_vectors * VECTOR_COLUMNS + row.lane, threshold)
    cute.arch.sync_threads()


@cute.jit
def marks_of_batches(row: Row, threshold: Uint32, first_batch: Int32, num_batches: Int32, strict: const_expr) -> Uint32:
    """8 bits for each of four of this thread's batches: vectors whose maximum reaches, or exceeds, the threshold."""
    bound = value_pair(threshold)
    marks = Uint32(0)
    for i in range_constexpr(min(HARVEST_BATCHES, row.config.batches)):
        if first_batch + i < num_batches:
            pair = (first_batch + i) * row.config.threads + row.thread
            steps = ptx.ld_shared_v4(row.smem + Uint32(row.layout.maxima) + Uint32(pair) * 16)
            marks = marks | (marks_of_steps(steps, bound, strict=strict) << Uint32(UNROLL * i))
    if const_expr(strict):
        # The comparison holds for NaN on either side, but nothing exceeds NaN.
        marks = marks * Uint32(threshold != MAX_KEY)
    return marks


@cute.jit
def harvest_window(
    row: Row, threshold: Uint32, first_batch: Int32, marks: Uint32, marks_before: Uint32, total: Uint32
) -> Uint32:
    """Collects from a warp's first WINDOW marked vectors, and returns the marks that remain.

    Args:
        row: the row.
        threshold: what an element has to reach.
        first_batch: the batch of the lowest 8 marks.
        marks: this thread's.
        marks_before: number of marks of the lanes below.
        total: number of marks of the warp.
    """
    names = row.smem + Uint32(row.layout.groups) + Uint32(row.warp * WINDOW) * 2
    at = marks_before
    while (marks != 0) & (at < WINDOW):
        bit = Int32(popc((marks - 1) & (Uint32(0xFFFFFFFF) - marks)))
        pair = (first_batch + bit // UNROLL) * row.config.threads + row.thread
        ptx.st_shared_u16(names + at * 2, Uint32(pair * UNROLL + bit % UNROLL))
        marks = marks & (marks - 1)
        at = at + 1
    cute.arch.sync_warp()
    num_names = Int32(total)
    if num_names > WINDOW:
        num_names = Int32(WINDOW)
    if const_expr(row.config.mode == "blocks"):
        keep_blocks(row, threshold, names, num_names)
    elif num_names <= VECTORS_AT_ONCE:
        keep_columns(row, threshold, names, num_names, Int32(0), 1)
    else:
        # A wide row's vectors come from memory: several loads in flight.
        for first in cutlass.range(0, num_names, VECTORS_AT_ONCE * LOADS_IN_FLIGHT, unroll=1):
            keep_columns(row, threshold, names, num_names, first, LOADS_IN_FLIGHT)
    cute.arch.sync_warp()
    return marks


def vector_of_name(row: Row, name: Int32) -> Int32:
    """The vector called (batch * threads + thread) * 8 + step in this CTA."""
    pair = name // UNROLL
    return vector_at(row, pair // row.config.threads, name % UNROLL, pair % row.config.threads)


@cute.jit
def keep_columns(
    row: Row, threshold: Uint32, names: Uint32, num_names: Int32, first: Int32, num_loads: const_expr
) -> None:
    """Keeps the columns of listed vectors that reach the threshold, a lane a column."""
    column = row.lane % VECTOR_COLUMNS
    keys = []
    vectors = []
    for load in range_constexpr(num_loads):
        i = first + load * VECTORS_AT_ONCE + row.lane // VECTOR_COLUMNS
        vector = vector_of_name(row, Int32(ptx.ld_shared_u16(names + Uint32(i) * 2)))
        keys.append(column_key_if(row, vector, column, (i < num_names) & (vector < row.num_vectors)))
        vectors.append(vector)
    for load in range_constexpr(num_loads):
        if first + load * VECTORS_AT_ONCE < num_names:
            keep_in_warp(row, keys[load], vectors[load] * VECTOR_COLUMNS + column, threshold)


@cute.jit
def keep_blocks(row: Row, threshold: Uint32, names: Uint32, num_names: Int32) -> None:
    """Keeps listed vectors themselves: their maxima are what blocks compete with."""
    for first in cutlass.range(0, num_names, WARP, unroll=1):
        i = first + row.lane
        key = Uint32(0)
        vector = Int32(0)
        if i < num_names:
            name = ptx.ld_shared_u16(names + Uint32(i) * 2)
            vector = vector_of_name(row, Int32(name))
            if vector < row.num_vectors:
                key = order_key(ptx.ld_shared_u16(row.smem + Uint32(row.layout.maxima) + name * 2))
        keep_in_warp(row, key, vector, threshold)


@cute.jit
def keep_in_warp(row: Row, key: Uint32, index: Int32, threshold: Uint32) -> None:
    """Appends each lane's element if it reaches the threshold; all lanes take part. Key 0 is no element."""
    config, layout = row.config, row.layout
    above = ptx.ballot(key > threshold)
    equal = ptx.ballot(key == threshold)
    if (above | equal) != 0:
        base = Uint32(0)
        if row.lane < 2:
            # Lane 0 takes places above the threshold, lane 1 at it, from neighbouring counters.
            num = popc(above)
            if row.lane == 1:
                num = popc(equal)
            base = ptx.atom_add_shared(counter(row, NUM_ABOVE) + Uint32(row.lane) * 4, num)
        is_equal = Uint32(key == threshold)
        mine = above
        if is_equal != 0:
            mine = equal
        at = ptx.shfl_idx(base, is_equal) + popc(mine & ptx.lanes_below())
        if key > threshold:  # noqa: SIM102
            if at < config.candidate_capacity:
                ptx.st_shared(row.smem + Uint32(layout.above_index) + at * 4, Uint32(index))
                ptx.st_shared_u16(row.smem + Uint32(layout.above_key) + at * 2, key)
        if key == threshold:  # noqa: SIM102
            # Of equal elements no more than k can be wanted: a row of ties costs no more than its scan.
            if at < config.k:
                ptx.st_shared(row.smem + Uint32(layout.equal_index) + at * 4, Uint32(index))
