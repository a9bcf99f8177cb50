# SPDX-License-Identifier: Apache-2.0
"""Collecting the elements that reach the threshold, from the few vectors whose maximum does. Inlined.

Every warp finds the hot ones among the vectors that it read, lists them and reads them again, from L1 or L2: a few
percent of the row. Warps do not wait for each other before the end.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import FEW_STEPS, UNROLL, VECTOR_COLUMNS, WARP, WINDOW
from decode.topk_exchange import NUM_ABOVE, NUM_EQUAL, counter
from decode.topk_find import popc, warp_inclusive_sum
from decode.topk_keys import MAX_KEY, Row, column_key_if, marks_of_steps, order_key, value_pair, vector_at
from nvcomm.ptx import cluster as ptx

VECTORS_AT_ONCE = WARP // VECTOR_COLUMNS
LOADS_IN_FLIGHT = 4
MARKED_BATCHES = 8  # whose 8 bits each fill two words of marks


@cute.jit
def harvest(row: Row, threshold: Uint32, num_batches: Int32, tail: Uint32) -> None:
    """Collects this CTA's elements above the threshold, and up to k of those at it, in shared memory.

    The counters go on past the capacities: an overflow is seen, and nothing is written past the end.
    """
    if row.num_vectors <= FEW_STEPS * row.config.step_vectors:
        marks, _ = marks_of_batches(row, threshold, Int32(0), num_batches, False)
        keep_listed(row, threshold, list_few(row, marks))
    else:
        for first_batch in cutlass.range(0, num_batches, MARKED_BATCHES, unroll=1):
            harvest_batches(row, threshold, first_batch, num_batches)
    if const_expr(row.config.mode == "columns"):  # noqa: SIM102
        if (row.cta == 0) & (row.warp == 0) & (row.num_tail > 0):
            keep_in_warp(row, [tail], [row.num_vectors * VECTOR_COLUMNS + row.lane], threshold)
    cute.arch.sync_threads()


def names_of_warp(row: Row) -> Uint32:
    """Where this warp lists hot vectors, each called (batch * threads + thread) * 8 + step."""
    return row.smem + Uint32(row.layout.groups) + Uint32(row.warp * WINDOW) * 2


@cute.jit
def list_few(row: Row, marks: Uint32) -> Int32:
    """Lists the marked vectors of the first steps; returns how many there are."""
    total = Uint32(0)
    for step in range_constexpr(FEW_STEPS):
        is_marked = (marks & Uint32(1 << step)) != 0
        lanes = ptx.ballot(is_marked)
        if is_marked:
            at = names_of_warp(row) + (total + popc(lanes & ptx.lanes_below())) * 2
            ptx.st_shared_u16(at, Uint32(row.thread * UNROLL + step))
        total = total + popc(lanes)
    return Int32(total)


@cute.jit
def harvest_batches(row: Row, threshold: Uint32, first_batch: Int32, num_batches: Int32) -> None:
    """Collects from up to eight batches, in windows of as many vectors as a warp can list."""
    low, high = marks_of_batches(row, threshold, first_batch, num_batches, False)
    count = popc(low) + popc(high)
    upto = warp_inclusive_sum(count)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    while total > 0:
        at = upto - count
        low, at = list_marked(row, first_batch, low, at)
        if const_expr(row.config.batches > 4):
            high, at = list_marked(row, first_batch + 4, high, at)
        listed = Int32(total)
        if listed > WINDOW:
            listed = Int32(WINDOW)
        keep_listed(row, threshold, listed)
        if total > WINDOW:
            # A row of ties: once there are k of them, only vectors with something above are worth a look.
            if ptx.ld_shared(counter(row, NUM_EQUAL)) >= row.config.k:
                strict_low, strict_high = marks_of_batches(row, threshold, first_batch, num_batches, True)
                low = low & strict_low
                high = high & strict_high
            count = popc(low) + popc(high)
            upto = warp_inclusive_sum(count)
            total = ptx.shfl_idx(upto, Uint32(WARP - 1))
        else:
            total = Uint32(0)


@cute.jit
def marks_of_batches(
    row: Row, threshold: Uint32, first_batch: Int32, num_batches: Int32, strict: const_expr
) -> tuple[Uint32, Uint32]:
    """8 bits for each of eight of this thread's batches: vectors whose maximum reaches, or exceeds, the threshold."""
    bound = value_pair(threshold)
    words = cute.make_rmem_tensor((2,), Uint32)
    words[0] = Uint32(0)
    words[1] = Uint32(0)
    for i in range_constexpr(min(MARKED_BATCHES, row.config.batches)):
        if first_batch + i < num_batches:
            pair = (first_batch + i) * row.config.threads + row.thread
            steps = ptx.ld_shared_v4(row.smem + Uint32(row.layout.maxima) + Uint32(pair) * 16)
            marks = marks_of_steps(steps, bound, strict=strict)
            words[i // 4] = words[i // 4] | (marks << Uint32(UNROLL * (i % 4)))
    if const_expr(strict):
        # The comparison holds for NaN on either side, but nothing exceeds NaN.
        for i in range_constexpr(2):
            words[i] = words[i] * Uint32(threshold != MAX_KEY)
    return words[0], words[1]


@cute.jit
def list_marked(row: Row, first_batch: Int32, marks: Uint32, at: Uint32) -> tuple[Uint32, Uint32]:
    """Lists this thread's marked vectors of four batches at places from `at` to the end of the window.

    Returns:
        The marks that remain, and the next place.
    """
    while (marks != 0) & (at < WINDOW):
        bit = Int32(popc((marks - 1) & (Uint32(0xFFFFFFFF) - marks)))
        pair = (first_batch + bit // UNROLL) * row.config.threads + row.thread
        ptx.st_shared_u16(names_of_warp(row) + at * 2, Uint32(pair * UNROLL + bit % UNROLL))
        marks = marks & (marks - 1)
        at = at + 1
    return marks, at


@cute.jit
def keep_listed(row: Row, threshold: Uint32, num_names: Int32) -> None:
    """Keeps what reaches the threshold in the vectors that this warp has listed."""
    cute.arch.sync_warp()
    if const_expr(row.config.mode == "blocks"):
        for first in cutlass.range(0, num_names, WARP, unroll=1):
            keep_blocks(row, threshold, num_names, first)
    elif num_names <= VECTORS_AT_ONCE:
        if num_names > 0:
            keep_columns(row, threshold, num_names, Int32(0), 1)
    else:
        # A wide row's vectors come from memory: several loads in flight.
        for first in cutlass.range(0, num_names, VECTORS_AT_ONCE * LOADS_IN_FLIGHT, unroll=1):
            keep_columns(row, threshold, num_names, first, LOADS_IN_FLIGHT)
    cute.arch.sync_warp()


def vector_of_name(row: Row, name: Int32) -> Int32:
    """The vector of that name."""
    pair = name // UNROLL
    return vector_at(row, pair // row.config.threads, name % UNROLL, pair % row.config.threads)


@cute.jit
def keep_columns(row: Row, threshold: Uint32, num_names: Int32, first: Int32, num_loads: const_expr) -> None:
    """Keeps the columns of listed vectors that reach the threshold, a lane a column."""
    column = row.lane % VECTOR_COLUMNS
    keys = []
    columns = []
    for load in range_constexpr(num_loads):
        i = first + load * VECTORS_AT_ONCE + row.lane // VECTOR_COLUMNS
        vector = vector_of_name(row, Int32(ptx.ld_shared_u16(names_of_warp(row) + Uint32(i) * 2)))
        columns.append(vector * VECTOR_COLUMNS + column)
        keys.append(column_key_if(row, vector, column, (i < num_names) & (vector < row.num_vectors)))
    keep_in_warp(row, keys, columns, threshold)


@cute.jit
def keep_blocks(row: Row, threshold: Uint32, num_names: Int32, first: Int32) -> None:
    """Keeps listed vectors themselves: their maxima are what blocks compete with."""
    i = first + row.lane
    key = Uint32(0)
    vector = Int32(0)
    if i < num_names:
        name = ptx.ld_shared_u16(names_of_warp(row) + Uint32(i) * 2)
        vector = vector_of_name(row, Int32(name))
        if vector < row.num_vectors:
            key = order_key(ptx.ld_shared_u16(row.smem + Uint32(row.layout.maxima) + name * 2))
    keep_in_warp(row, [key], [vector], threshold)


@cute.jit
def keep_in_warp(row: Row, keys: list[Uint32], indices: list[Int32], threshold: Uint32) -> None:
    """Appends each lane's elements that reach the threshold; all lanes take part. Key 0 is no element."""
    above = [ptx.ballot(key > threshold) for key in keys]
    equal = [ptx.ballot(key == threshold) for key in keys]
    num_above = popc(above[0])
    num_equal = popc(equal[0])
    for i in range_constexpr(1, len(keys)):
        num_above = num_above + popc(above[i])
        num_equal = num_equal + popc(equal[i])
    if num_above + num_equal != 0:
        base = Uint32(0)
        if row.lane < 2:
            # Lane 0 takes places above the threshold, lane 1 at it, from neighbouring counters.
            count = num_above
            if row.lane == 1:
                count = num_equal
            base = ptx.atom_add_shared(counter(row, NUM_ABOVE) + Uint32(row.lane) * 4, count)
        at_above = ptx.shfl_idx(base, Uint32(0))
        at_equal = ptx.shfl_idx(base, Uint32(1))
        below = ptx.lanes_below()
        for i in range_constexpr(len(keys)):
            if keys[i] > threshold:
                put_above(row, at_above + popc(above[i] & below), keys[i], indices[i])
            if keys[i] == threshold:
                put_equal(row, at_equal + popc(equal[i] & below), indices[i])
            at_above = at_above + popc(above[i])
            at_equal = at_equal + popc(equal[i])


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
