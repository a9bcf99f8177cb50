# SPDX-License-Identifier: Apache-2.0
"""What all ranks share in a sublayer boundary: residual streams and factors, on the device.

Everything is a whole number, so that FP32 holds it exactly up to the two roundings to bf16.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32

from nvcomm.ptx import arith
from stress import oracle, sum_oracle
from stress.kernels.kernel import Place, RankHandle
from stress.kernels.sum_words import pair


def common_key(handle: RankHandle, place: Place) -> Uint32:
    """The key of all of it in one boundary."""
    return sum_oracle.common_key(handle.seed_key, Uint32(place.gather), place.replay, Uint32)


def factor(key: Uint32, index: Int32) -> Float32:
    """One of post and comb: 0 to 3."""
    return Float32(Int32(sum_oracle.small(key, Uint32(index), 2, Uint32)))


def pre_factor(key: Uint32, index: Int32) -> Float32:
    """One of pre: 1 to 4, so that something is left of every row."""
    return arith.add_rn(factor(key, index), Float32(1))


def stream_word(key: Uint32, index: Int32) -> Uint32:
    """Two numbers of a residual stream, as bf16."""
    word = oracle.payload(key, Uint32(index), Uint32(0), Uint32)
    return pair(word & Uint32(31), (word >> Uint32(16)) & Uint32(31))
