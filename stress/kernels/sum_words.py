# SPDX-License-Identifier: Apache-2.0
"""Words of sums on the device: two bf16 each."""

from __future__ import annotations

from cutlass import Boolean, Float32, Int32, Uint32

from nvcomm.ptx import mma
from stress import oracle, sum_oracle

NAN_PAIR = 0x7FFF7FFF


def pair(low: Uint32, high: Uint32) -> Uint32:
    """Two whole numbers as bf16."""
    return mma.cvt_rn_bf16x2(Float32(Int32(low)), Float32(Int32(high)))


def pair_of(numbers: Uint32) -> Uint32:
    """The same, of the numbers in the halves of a word."""
    return pair(numbers & Uint32(0xFFFF), numbers >> Uint32(16))


def contribution(key: Uint32, index: Int32, reserved: Uint32) -> Uint32:
    """The two bf16 that a rank contributes at a word; a reserved word as it is."""
    word = oracle.payload(key, Uint32(index), reserved, Uint32)
    lost = sum_oracle.is_reserved(word, Uint32)
    plain = pair_of(sum_oracle.numbers(word, Uint32))
    return plain ^ ((plain ^ word) * lost)


def differs(seen: Uint32, want: Uint32, ulps: int = 0) -> Boolean:
    """Whether two pairs of bf16 are more than so many units in the last place apart; NaN is equal to NaN.

    With `ulps` for numbers of one sign alone, whose bits are in order.
    """
    different = Boolean(False)
    for shift in (0, 16):
        a, b = (Int32((word >> Uint32(shift)) & Uint32(0xFFFF)) for word in (seen, want))
        apart = Boolean(a > b + ulps) | Boolean(b > a + ulps)
        different = different | (apart & (is_number(a) | is_number(b)))
        different = different | (is_number(a) ^ is_number(b))
    return different


def is_number(half: Int32) -> Boolean:
    """Whether a bf16 is not NaN."""
    return Boolean((half & Int32(0x7FFF)) <= Int32(0x7F80))
