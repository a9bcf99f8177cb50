# SPDX-License-Identifier: Apache-2.0
"""Reading a row once and keeping maxima: of every vector in shared memory, of every group in registers. Inlined."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from decode.topk_config import UNROLL, VECTOR_BYTES
from decode.topk_keys import NEG_INF_PAIR, interleave_maxima, max_nan_pair, max_of_pair, order_key
from decode.topk_row import Quad, Row, ld_vector_below, vector_address, vector_at
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory

# Registers of pairs that a batch is folded into: four pairs of vector maxima, then running maxima of places.
PAIRS = UNROLL // 2


def uses_places(row: Row) -> bool:
    """Whether a thread has several groups by the place of a column in its vector.

    A single group needs no places. Groups of blocks have to hold whole vectors: there they go by step.
    """
    return row.config.groups_per_thread > 1 and row.config.mode == "columns"


def num_best_pairs(row: Row) -> int:
    """Registers for the maxima of a thread's groups."""
    return max(1, row.config.groups_per_thread // 2)


def fold(row: Row, quads: list[Quad]) -> tuple[list[Uint32], list[Uint32]]:
    """The maxima of up to 8 vectors in the halves of four registers, and the maxima of each place over the vectors."""
    of_vector = []
    for a, b, c, d in quads:
        of_vector.append(max_nan_pair(max_nan_pair(a, b), max_nan_pair(c, d)))
    of_vector += [Uint32(NEG_INF_PAIR)] * (UNROLL - len(quads))
    of_steps = [Uint32(NEG_INF_PAIR)] * PAIRS
    for i in range(-(-len(quads) // 2)):
        of_steps[i] = interleave_maxima(of_vector[2 * i], of_vector[2 * i + 1])
    of_places: list[Uint32] = []
    if uses_places(row):
        of_places = list(quads[0])
        for quad in quads[1:]:
            of_places = [max_nan_pair(x, y) for x, y in zip(of_places, quad, strict=True)]
    return of_steps, of_places


@cute.jit
def stream(row: Row, groups: cute.Tensor, first: Quad) -> Int32:
    """Reads the row once: a maximum per vector to shared memory, this thread's group maxima (keys) to `groups`.

    Args:
        row: the row, of at least one vector.
        groups: registers for the keys.
        first: this thread's first vector, which was read before the row's length was known.

    Returns:
        The number of batches.
    """
    config = row.config
    num_steps = (row.num_vectors + config.step_vectors - 1) // config.step_vectors
    num_batches = (num_steps + UNROLL - 1) // UNROLL
    best = cute.make_rmem_tensor((num_best_pairs(row),), Uint32)
    for i in range_constexpr(cute.size(best)):
        best[i] = Uint32(NEG_INF_PAIR)
    read_batch(row, best, Int32(0), num_steps, [first])
    if const_expr(config.batches > 1):
        for batch in cutlass.range(1, num_batches, unroll=1):
            read_batch(row, best, batch, num_steps, [])
    group_keys(row, best, groups)
    return num_batches


@cute.jit
def read_batch(row: Row, best: cute.Tensor, batch: Int32, num_steps: Int32, early: list[Quad]) -> None:
    """Reads one batch, of which `early` is there already, and folds it into `best`."""
    config = row.config
    steps = cute.make_rmem_tensor((PAIRS,), Uint32)
    places = cute.make_rmem_tensor((PAIRS,), Uint32)
    for i in range_constexpr(PAIRS):
        steps[i] = Uint32(NEG_INF_PAIR)
        places[i] = Uint32(NEG_INF_PAIR)
    vector = vector_at(row, batch, Int32(0), row.thread)
    addr = vector_address(row, vector)
    if vector + (UNROLL - 1) * config.step_vectors < row.num_vectors:
        load_batch(row, steps, places, addr, early)
    else:
        # Few steps are left in a short row: no need to look at eight.
        steps_left = num_steps - batch * UNROLL
        if steps_left <= 1:
            load_last_batch(row, steps, places, addr, vector, early, 1)
        elif steps_left <= 2:
            load_last_batch(row, steps, places, addr, vector, early, 2)
        elif steps_left <= 4:
            load_last_batch(row, steps, places, addr, vector, early, 4)
        else:
            load_last_batch(row, steps, places, addr, vector, early, UNROLL)
    at = row.smem + Uint32(row.layout.maxima) + Uint32(batch * config.threads + row.thread) * 16
    ptx.st_shared_v4(at, (steps[0], steps[1], steps[2], steps[3]))
    for i in range_constexpr(PAIRS):
        pair = i % num_best_pairs(row)
        best[pair] = max_nan_pair(best[pair], places[i] if const_expr(uses_places(row)) else steps[i])


def group_keys(row: Row, best: cute.Tensor, groups: cute.Tensor) -> None:
    """The keys of 1, 2, 4 or 8 groups from pairs of maxima."""
    if row.config.groups_per_thread == 1:
        groups[0] = order_key(max_of_pair(best[0]))
    else:
        for i in range(num_best_pairs(row)):
            groups[2 * i] = order_key(best[i] & Uint32(0xFFFF))
            groups[2 * i + 1] = order_key(best[i] >> Uint32(16))


@cute.jit
def load_batch(row: Row, steps: cute.Tensor, places: cute.Tensor, addr: Int64, early: list[Quad]) -> None:
    """A batch that exists as a whole: 8 loads in flight, then their maxima."""
    stride = row.config.step_vectors * VECTOR_BYTES
    store(row, steps, places, early + [memory.ld_weak_v4(addr + Int64(u * stride)) for u in range(len(early), UNROLL)])


@cute.jit
def load_last_batch(
    row: Row,
    steps: cute.Tensor,
    places: cute.Tensor,
    addr: Int64,
    vector: Int32,
    early: list[Quad],
    num_steps: const_expr,
) -> None:
    """A batch of `num_steps` steps, of which some vectors may lie past the end of the row: those count as -inf."""
    step = row.config.step_vectors
    loaded = [
        ld_vector_below(addr + Int64(u * step * VECTOR_BYTES), vector + u * step, row.num_vectors)
        for u in range(len(early), num_steps)
    ]
    quads = [keep_below(early[u], vector + u * step, row.num_vectors) for u in range(min(len(early), num_steps))]
    store(row, steps, places, quads + loaded)


@cute.jit
def keep_below(quad: Quad, vector: Int32, num_vectors: Int32) -> Quad:
    """A vector if it lies below `num_vectors`, else eight times -inf."""
    a, b, c, d = quad
    if vector >= num_vectors:
        a = b = c = d = Uint32(NEG_INF_PAIR)
    return a, b, c, d


def store(row: Row, steps: cute.Tensor, places: cute.Tensor, quads: list[Quad]) -> None:
    """Leaves what `fold` makes of the vectors in registers."""
    of_steps, of_places = fold(row, quads)
    for i, pair in enumerate(of_steps):
        steps[i] = pair
    for i, pair in enumerate(of_places):
        places[i] = pair
