# SPDX-License-Identifier: Apache-2.0
"""A chunk of the sublayer boundary in registers: post-mix, collapse, and what RMSNorm needs.

The steps and their roundings are those of `nvcomm.reference.collectives.mhc_boundary`. Plain functions that run while
a kernel is traced; a chunk is 4 words of 2 bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32

from nvcomm.collectives.all_reduce_tree import narrow, widen
from nvcomm.mailbox import CHUNK_WORDS
from nvcomm.ptx import arith

Words = Sequence[Uint32]
Floats = Sequence[Float32]


def post_mix(y: Words, residual: Sequence[Words], post: Floats, comb: Sequence[Floats]) -> list[list[Uint32]]:
    """The new residual streams: a product with `post`, then an fma for each source stream in order, one rounding.

    Args:
        y: a chunk of the reduced output.
        residual: a chunk of each stream.
        post: a factor for each target stream.
        comb: comb[s][t], from source stream s to target stream t.
    """
    num_streams = len(residual)
    streams: list[list[Uint32]] = [[] for _ in range(num_streams)]
    for i in range(CHUNK_WORDS):
        values = widen(y[i], "bf16")
        sources = [widen(stream[i], "bf16") for stream in residual]
        for t in range(num_streams):
            mixed = [arith.mul_rn(value, post[t]) for value in values]
            for s in range(num_streams):
                mixed = [arith.fma_rn(old, comb[s][t], one) for old, one in zip(sources[s], mixed, strict=True)]
            streams[t].append(narrow(mixed, "bf16"))
    return streams


def collapse(streams: Sequence[Words], pre: Floats) -> list[Float32]:
    """The next sublayer's input before its norm: a product, then an fma for each further stream, rounded to bf16."""
    values: list[Float32] = []
    for i in range(CHUNK_WORDS):
        total = [arith.mul_rn(value, pre[0]) for value in widen(streams[0][i], "bf16")]
        for stream, factor in zip(streams[1:], pre[1:], strict=True):
            total = [
                arith.fma_rn(value, factor, old) for value, old in zip(widen(stream[i], "bf16"), total, strict=True)
            ]
        values.extend(widen(narrow(total, "bf16"), "bf16"))
    return values


def sum_of_squares(values: Floats) -> Float32:
    """Over a thread's values, in order."""
    total = arith.mul_rn(values[0], values[0])
    for value in values[1:]:
        total = arith.fma_rn(value, value, total)
    return total


def scale(values: Floats, factor: Float32, weight: Words) -> list[Uint32]:
    """A chunk of RMSNorm's result: value * factor * weight, rounded to bf16."""
    words = []
    for i in range(CHUNK_WORDS):
        pair = zip(values[2 * i : 2 * i + 2], widen(weight[i], "bf16"), strict=True)
        words.append(narrow([arith.mul_rn(arith.mul_rn(value, factor), one) for value, one in pair], "bf16"))
    return words
