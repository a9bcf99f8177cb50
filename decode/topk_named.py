# SPDX-License-Identifier: Apache-2.0
"""Vectors by their names: their words, read again, and which of their elements reach a key. Inlined into the kernels.

A name is 16 bits: a vector's step and lane among those that the warp has read (see `vector_of_name`).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from decode.topk_config import UNROLL, WARP, WINDOW
from decode.topk_find import popc
from decode.topk_keys import MAX_KEY, NEG_INF_PAIR, marks_above, value_below, value_pair
from decode.topk_row import Quad, Row, ld_vector_below, vector_address, vector_of_name
from nvcomm.ptx import cluster as ptx


def names_of_warp(row: Row) -> Uint32:
    """Where this warp names hot vectors (see `vector_of_name`); the first places are for those that it holds."""
    return row.smem + Uint32(row.layout.groups) + Uint32(row.warp * (WARP + WINDOW)) * 2


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
