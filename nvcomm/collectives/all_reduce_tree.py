# SPDX-License-Identifier: Apache-2.0
"""The one order of addition, and which words may travel (docs/mailbox.md R13, R5).

Plain functions that run while a kernel is traced: their `if` and `for` are over compile-time values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from cutlass import Float32, Uint32

from nvcomm.mailbox import CHUNK_WORDS, ESCAPE
from nvcomm.ptx import arith, mma

Dtype = Literal["bf16", "fp16", "fp32"]
ELEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}

_WIDEN: dict[Dtype, Callable[[Uint32], tuple[Float32, ...]]] = {
    "bf16": mma.cvt_bf16x2_f32,
    "fp16": mma.cvt_f16x2_f32,
    "fp32": lambda word: (mma.bits_f32(word),),
}
_ROUND: dict[Dtype, Callable[..., Uint32]] = {
    "bf16": mma.cvt_rn_bf16x2,
    "fp16": mma.cvt_rn_f16x2,
    "fp32": arith.f32_bits,
}


def widen(word: Uint32, dtype: Dtype) -> tuple[Float32, ...]:
    """The values in a word as FP32, exactly; the lower half first."""
    return _WIDEN[dtype](word)


def narrow(values: Sequence[Float32], dtype: Dtype) -> Uint32:
    """A word of values, each rounded to nearest even: the only rounding of a sum (R13)."""
    return _ROUND[dtype](*values)


def tree_sum(values: Sequence[Float32]) -> Float32:
    """Sum over the ranks, split at the largest power of two below their number (R13)."""
    if len(values) == 1:
        return values[0]
    split = 1 << (len(values) - 1).bit_length() - 1
    return arith.add_rn(tree_sum(values[:split]), tree_sum(values[split:]))


def sum_rows(words: Sequence[Uint32], num_rows: int, dtype: Dtype) -> list[Uint32]:
    """Sums one chunk of every rank's row, 4 words a row in rank order, and rounds once."""
    total = []
    for i in range(CHUNK_WORDS):
        rows = [widen(words[r * CHUNK_WORDS + i], dtype) for r in range(num_rows)]
        total.append(narrow([tree_sum(values) for values in zip(*rows, strict=True)], dtype))
    return total


def sendable(words: Sequence[Uint32]) -> tuple[Uint32, ...]:
    """Words that may travel (R5): a reserved one, a NaN in every dtype, becomes the NaN with the other sign."""
    return tuple(word ^ (Uint32((word | Uint32(1)) == Uint32(ESCAPE)) << Uint32(31)) for word in words)
