# SPDX-License-Identifier: Apache-2.0
"""A row inside a top-k kernel, as vectors of 8 columns: which thread reads which, and their keys. Inlined."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr

from decode.topk_config import UNROLL, VECTOR_BYTES, VECTOR_COLUMNS, WARP, SharedLayout, TopkConfig
from decode.topk_keys import NEG_INF_PAIR, max_nan_pair, max_of_pair, order_key
from nvcomm.ptx import memory

Quad = tuple[Uint32, Uint32, Uint32, Uint32]


@dataclass(frozen=True)
class Row:
    """One row inside a kernel. Everything but `config` and `layout` is a run-time value.

    Attributes:
        config: what the kernel is compiled for.
        layout: its shared memory.
        smem: shared address of this CTA's memory.
        thread: thread of the CTA.
        lane: lane of the warp.
        warp: warp of the CTA.
        cta: rank of the CTA in the cluster.
        data: address of the row.
        out: address of the first selected index.
        num_vectors: whole vectors of 8 columns.
        num_tail: columns after them, fewer than 8; in block mode 0.
        num_select: elements to select, at least 1.
    """

    config: TopkConfig
    layout: SharedLayout
    smem: Uint32
    thread: Int32
    lane: Int32
    warp: Int32
    cta: Int32
    data: Int64
    out: Int64
    num_vectors: Int32
    num_tail: Int32
    num_select: Uint32

    @property
    def elements(self) -> int:
        """Elements of a vector: 8 columns, or one block."""
        return VECTOR_COLUMNS if self.config.mode == "columns" else 1


def ld_vector_if(addr: Int64, inside: Boolean, otherwise: Quad) -> Quad:
    """16 bytes if `inside`, else `otherwise` and no access."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, {$r2}; mov.b32 {$w1}, {$r3}; mov.b32 {$w2}, {$r4}; "
        "mov.b32 {$w3}, {$r5}; @p ld.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr, Uint32(inside), *otherwise],
    )


def ld_vector_below(addr: Int64, vector: Int32, num_vectors: Int32) -> Quad:
    """16 bytes if `vector` is below `num_vectors`, else eight times -inf and no access."""
    return ld_vector_if(addr, vector < num_vectors, (Uint32(NEG_INF_PAIR),) * 4)


def first_vector(config: TopkConfig, cta: Int32, thread: Int32) -> Int32:
    """The vector that a thread reads first.

    A warp reads 512 consecutive bytes, and the CTAs of the cluster take turns: also a short row is spread over all
    of them. The turn shifts with the warp, so that a period of the data in columns does not meet one CTA alone.
    """
    warp = thread // WARP
    return (warp * config.cluster + (cta + warp) % config.cluster) * WARP + thread % WARP


def vector_of_name(row: Row, name: Uint32) -> Int32:
    """The vector that this warp calls so."""
    first = Uint32(first_vector(row.config, row.cta, row.warp * WARP))
    return Int32(first + (name & (WARP - 1)) + (name >> Uint32(5)) * row.config.step_vectors)


def vector_at(row: Row, batch: Int32, step: Int32, thread: Int32) -> Int32:
    """The vector that `thread` of this CTA reads in step `step` of batch `batch`."""
    return first_vector(row.config, row.cta, thread) + (batch * UNROLL + step) * row.config.step_vectors


def vector_address(row: Row, vector: Int32) -> Int64:
    """Where a vector lies: 64 bits, a row may start beyond 2^31 bytes."""
    return row.data + Int64(vector) * VECTOR_BYTES


def keys_of_words(row: Row, words: Quad) -> list[Uint32]:
    """The keys of a vector's elements: 8 columns, or the maximum of a block."""
    if const_expr(row.config.mode == "blocks"):
        pair = max_nan_pair(max_nan_pair(words[0], words[1]), max_nan_pair(words[2], words[3]))
        return [order_key(max_of_pair(pair))]
    keys = []
    for word in words:
        keys += [order_key(word & Uint32(0xFFFF)), order_key(word >> Uint32(16))]
    return keys


def tail_key(row: Row, i: Int32) -> Uint32:
    """The key of column `i` after the whole vectors; they are read one by one: nothing beyond the length is touched."""
    addr = vector_address(row, row.num_vectors) + Int64(i) * 2
    return order_key(memory.ld_weak_u16(addr))


@cute.jit
def keys_of_vector(row: Row, keys: cute.Tensor, vector: Int32) -> None:
    """Reads any vector's keys into `keys`: 0 for what does not exist, beyond the length or past the last vector."""
    for e in range_constexpr(row.elements):
        keys[e] = Uint32(0)
    if vector < row.num_vectors:
        found = keys_of_words(row, memory.ld_weak_v4(vector_address(row, vector)))
        for e in range_constexpr(row.elements):
            keys[e] = found[e]
    if const_expr(row.config.mode == "columns"):  # noqa: SIM102
        if vector == row.num_vectors:
            for e in range_constexpr(VECTOR_COLUMNS - 1):
                if Int32(e) < row.num_tail:
                    keys[e] = tail_key(row, Int32(e))
