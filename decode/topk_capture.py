# SPDX-License-Identifier: Apache-2.0
"""Keeping vectors while a wide row streams by, so that they need not be read again. Inlined.

Each warp guesses a bound of the k-th key from the maxima of its lanes, and keeps the vectors whose maximum reaches it.
A guess that turns out above the threshold, or too many vectors, costs time and nothing else: `topk_harvest` then finds
the warp's vectors by their maxima.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, range_constexpr

from decode.topk_config import KEPT, UNROLL, VECTOR_BYTES, WARP
from decode.topk_find import popc
from decode.topk_keys import (
    MIN_KEY,
    Quad,
    Row,
    first_vector,
    marks_above,
    max_nan_pair,
    max_of_pair,
    max_u32,
    name_of_vector,
    order_key,
    value_below,
)
from nvcomm.ptx import cluster as ptx

# What a warp knows is one word, registers are scarce: the guessed key, and above it the vectors that have reached it.
COUNT_SHIFT = 16


def new_capture() -> cute.Tensor:
    """What is known before the first batch."""
    known = cute.make_rmem_tensor((1,), Uint32)
    known[0] = Uint32(0)
    return known


def guessed_key(known: cute.Tensor) -> Uint32:
    """The key that kept vectors reach."""
    return known[0] & Uint32((1 << COUNT_SHIFT) - 1)


def num_reached(known: cute.Tensor) -> Uint32:
    """How many vectors have reached it; they are kept as long as there is space."""
    return known[0] >> Uint32(COUNT_SHIFT)


def is_whole(row: Row, batch: Int32) -> Boolean:
    """Whether all vectors of a batch exist, for all lanes of this warp."""
    last = first_vector(row.config, row.cta, row.warp * WARP + (WARP - 1))
    return last + (batch * UNROLL + UNROLL - 1) * row.config.step_vectors < row.num_vectors


@cute.jit
def capture(
    row: Row,
    known: cute.Tensor,
    batch: Int32,
    num_batches: Int32,
    quads: list[Quad],
    steps: cute.Tensor,
    best: cute.Tensor,
) -> None:
    """Keeps the vectors of a whole batch that reach the guess. All lanes of the warp take part.

    Args:
        row: the row.
        known: what the warp knows.
        batch: number of the batch.
        num_batches: batches of the row, at least 1.
        quads: this lane's 8 vectors.
        steps: their maxima.
        best: pairs whose maximum is that of the lane's batches before.
    """
    if (batch & (batch + 1)) == 0:
        guess(row, known, batch, num_batches, steps, best)
    marks = marks_above((steps[0], steps[1], steps[2], steps[3]), value_below(guessed_key(known)))
    if ptx.ballot(marks != 0) != 0:
        for u in range_constexpr(UNROLL):
            is_marked = (marks & Uint32(1 << u)) != 0
            lanes = ptx.ballot(is_marked)
            at = num_reached(known) + popc(lanes & ptx.lanes_below())
            if is_marked & (at < KEPT):
                ptx.st_shared_v4(kept_vectors(row) + at * VECTOR_BYTES, quads[u])
                ptx.st_shared_u16(kept_names(row) + at * 2, name_of_vector(row, batch * UNROLL + u))
            known[0] = known[0] + (popc(lanes) << Uint32(COUNT_SHIFT))


@cute.jit
def guess(
    row: Row, known: cute.Tensor, batch: Int32, num_batches: Int32, steps: cute.Tensor, best: cute.Tensor
) -> None:
    """Takes the n-th largest of the lanes' maxima so far, with n well above the lanes that will reach the threshold."""
    pair = max_nan_pair(max_nan_pair(steps[0], steps[1]), max_nan_pair(steps[2], steps[3]))
    for i in range_constexpr(cute.size(best)):
        pair = max_nan_pair(pair, best[i])
    key = order_key(max_of_pair(pair))
    # Elements of a warp that reach the threshold are 1 to 1.4 times its share of k.
    share = -(-7 * row.config.quota // (5 * row.config.warps))
    expected = share * (batch + 1) // num_batches + 1
    rank = Uint32(expected + expected // 2 + 6)
    found = Uint32(0)
    for bit in range_constexpr(15, 1, -1):
        higher = found | Uint32(1 << bit)
        if popc(ptx.ballot(key >= higher)) >= rank:
            found = higher
    known[0] = (num_reached(known) << Uint32(COUNT_SHIFT)) | max_u32(found, Uint32(MIN_KEY))


def kept_vectors(row: Row) -> Uint32:
    """Where this warp keeps vectors."""
    return row.smem + Uint32(row.layout.kept) + Uint32(row.warp * (KEPT * VECTOR_BYTES))


def kept_names(row: Row) -> Uint32:
    """Where this warp keeps their names."""
    return row.smem + Uint32(row.layout.kept_names) + Uint32(row.warp * (KEPT * 2))
