# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA's kernel is told. Named tuples: of numbers on the host, of DSL values inside the kernel.

One by one and in this order the fields are the GPU function's parameters.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from cutlass import Float32, Int32, Int64

Number: TypeAlias = Int64 | Int32 | Float32


class ColumnLists(NamedTuple):
    """A column set of all tokens.

    Attributes:
        indices: address of the first token's list.
        indices_stride: bytes from list to list.
        lengths: address of the lengths, or 0.
        pool: address of the pool's first page.
        page_stride: bytes from page to page.
        width: entries of a list.
        first: position of a list's first entry in what the lengths count.
        shift: log2 of the records to a page.
        num_slots: slots of the pool.
    """

    indices: Int64
    indices_stride: Int64
    lengths: Int64
    pool: Int64
    page_stride: Int64
    width: Int32
    first: Int32
    shift: Int32
    num_slots: Int32


class Work(NamedTuple):
    """A call, but for the number of tokens, which the grid says.

    Attributes:
        query: address of (tokens, heads, 512).
        query_stride: bytes from token to token.
        out: address of (tokens, heads, 512) bf16.
        lse: address of (tokens, heads) fp32.
        sink: address of (heads,) fp32, or 0.
        window: first column set.
        topk: second column set, or the first again.
        window_columns: position at which the second set begins, in both lists put one after the other.
        heads: of a token.
        score_scale: factor of a score, in units of log2.
        out_scale: factor of the output.
    """

    query: Int64
    query_stride: Int64
    out: Int64
    lse: Int64
    sink: Int64
    window: ColumnLists
    topk: ColumnLists
    window_columns: Int32
    heads: Int32
    score_scale: Float32
    out_scale: Float32

    def numbers(self) -> list[Number]:
        """All of them in one list. So the kernel takes them, whose name would otherwise hold the fields'."""
        return [*self[:5], *self.window, *self.topk, *self[7:]]

    @classmethod
    def of(cls, numbers: list[Number]) -> Work:
        """From what `numbers` returned."""
        window, topk = ColumnLists._make(numbers[5:14]), ColumnLists._make(numbers[14:23])
        return cls._make([*numbers[:5], window, topk, *numbers[23:]])
