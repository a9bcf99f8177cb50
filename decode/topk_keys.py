# SPDX-License-Identifier: Apache-2.0
"""BF16 as ordered 16-bit keys, and pairs of BF16 in a word. Inlined into the top-k kernels.

A key is 0x8000 plus the magnitude of a positive value, minus that of a negative one: both zeros get 0x8000, -inf the
smallest key 0x0080, +inf 0xFF80, and every NaN, whatever its sign, 0xFFFF. 0 is the key of "no element".
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Uint32

MIN_KEY = 0x0080
INF_KEY = 0xFF80
MAX_KEY = 0xFFFF
NEG_INF_PAIR = 0xFF80FF80


def order_key(bits: Uint32) -> Uint32:
    """The key of a BF16 value, given in the low half of a word whose high half is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred n, q; .reg .b32 m, s, p; and.b32 m, {$r0}, 0x7fff; sub.u32 s, 0x8000, m; add.u32 p, m, 0x8000; "
        "setp.gt.u32 n, {$r0}, 0x7fff; selp.b32 p, s, p, n; setp.gt.u32 q, m, 0x7f80; "
        "selp.b32 {$w0}, 0xffff, p, q; }",
        write_only_types=[Uint32],
        read_only_args=[bits],
    )


def max_nan_pair(a: Uint32, b: Uint32) -> Uint32:
    """The larger BF16 in each half; NaN where either is NaN."""
    return cute.arch.inline_ptx("max.NaN.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def max_u32(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two."""
    return cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def min_u32(a: Uint32, b: Uint32) -> Uint32:
    """The smaller of two."""
    return cute.arch.inline_ptx("min.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def max_of_pair(pair: Uint32) -> Uint32:
    """The larger of the two halves, in the low half; the high half is 0."""
    return max_nan_pair(pair, (pair >> Uint32(16)) | (pair << Uint32(16))) & Uint32(0xFFFF)


def value_pair(key: Uint32) -> Uint32:
    """The BF16 value of a key, in both halves."""
    positive = key - Uint32(0x8000)
    negative = Uint32(0x10000) - key
    bits = Uint32(key >= 0x8000) * positive + Uint32(key < 0x8000) * negative
    return bits | (bits << Uint32(16))


def value_below(key: Uint32) -> Uint32:
    """A BF16 value, in both halves, that `marks_above` finds exactly the values of `key` or more above.

    Below the smallest NaN that is +inf, and below -inf a NaN, which everything counts as above.
    """
    return value_pair(min_u32(key - 1, Uint32(INF_KEY)))


def marks_above(pairs: Sequence[Uint32], bound: Uint32) -> Uint32:
    """Bit i says that half i of the pairs is above `bound`'s, or that either is NaN."""
    last = len(pairs)
    lines = " ".join(
        f"setp.gtu.bf16x2 p|q, {{$r{i}}}, {{$r{last}}}; @p or.b32 m, m, {1 << (2 * i)}; @q or.b32 m, m, {2 << (2 * i)};"
        for i in range(last)
    )
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; .reg .b32 m; mov.b32 m, 0; " + lines + " mov.b32 {$w0}, m; }",
        write_only_types=[Uint32],
        read_only_args=[*pairs, bound],
    )


def interleave_maxima(a: Uint32, b: Uint32) -> Uint32:
    """The larger half of `a` in the low half, the larger half of `b` in the high half."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 l, h; prmt.b32 l, {$r0}, {$r1}, 0x5410; prmt.b32 h, {$r0}, {$r1}, 0x7632; "
        "max.NaN.bf16x2 {$w0}, l, h; }",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )
