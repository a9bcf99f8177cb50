# SPDX-License-Identifier: Apache-2.0
"""The steps of a row's top-k one after the other, and what is written where there is nothing to choose. Inlined."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import TopkConfig
from decode.topk_emit import emit, find_kth, put
from decode.topk_exchange import exchange_bracket, exchange_counts
from decode.topk_find import group_threshold
from decode.topk_harvest import harvest
from decode.topk_keys import MIN_KEY
from decode.topk_ordered import count_all, emit_in_order
from decode.topk_row import Quad, Row, tail_key
from decode.topk_stream import stream

NUM_STAMPS = 10


@cute.jit
def stamp(config: TopkConfig, stamps: cute.Tensor, which: int) -> None:
    """Reads the clock, for measurements."""
    if const_expr(config.stamps):
        stamps[which] = Uint32(cute.arch.clock())


@cute.jit
def take_all(row: Row, length: Int32) -> None:
    """A row no longer than k: all of its columns, then -1."""
    index = row.cta * row.config.threads + row.thread
    while index < row.config.k:
        value = index
        if index >= length:
            value = Int32(-1)
        put(row, Uint32(index), Uint32(value))
        index = index + row.config.step_vectors


@cute.jit
def fill(row: Row, first: Uint32) -> None:
    """-1 from place `first` on, in block mode: the last k - 1 places follow the pinned block."""
    at = first + Uint32(row.cta * row.config.threads + row.thread)
    while at < row.config.k - 1:
        put(row, at, Uint32(0xFFFFFFFF))
        at = at + row.config.step_vectors


@cute.jit
def select(row: Row, first: Quad, stamps: cute.Tensor) -> None:
    """The top `num_select` elements of a row that has more than that, or in block mode at least that many."""
    config = row.config
    tail = Uint32(0)
    if (row.cta == 0) & (row.thread < row.num_tail):
        tail = tail_key(row, row.thread)
    groups = cute.make_rmem_tensor((config.groups_per_thread,), Uint32)
    num_batches = stream(row, groups, first)
    stamp(config, stamps, 3)
    own_threshold, own_largest = group_threshold(row, groups, tail)
    stamp(config, stamps, 4)
    bracket = exchange_bracket(row, own_threshold, own_largest)
    stamp(config, stamps, 5)
    held = harvest(row, bracket, num_batches, tail)
    stamp(config, stamps, 6)
    exchange_counts(row, bracket)
    stamp(config, stamps, 7)
    kth, above, count, overflow = find_kth(row, bracket, held)
    stamp(config, stamps, 8)
    if overflow != 0:
        kth, above = count_all(row)
        emit_in_order(row, kth, above)
    elif const_expr(config.deterministic):
        emit_in_order(row, kth, above & Uint32(0xFFFF))
    else:
        emit(row, bracket.threshold, held, kth, above, count)
    if const_expr(config.mode == "blocks"):
        end = row.num_select
        if kth == MIN_KEY:
            end = above & Uint32(0xFFFF)
        fill(row, end)
    if const_expr(config.stamps):
        stamp(config, stamps, 9)
        cute.arch.sync_threads()
        if (row.thread == 0) & (row.cta == config.cluster - 1):
            for i in range_constexpr(NUM_STAMPS):
                put(row, Uint32(i), stamps[i])
