# SPDX-License-Identifier: Apache-2.0
"""Number formats of the emulator: registers are arrays of unsigned bits, these functions read and make them.

FP32 results are rounded as the hardware does it: once, and every NaN becomes the canonical one.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KINDS: dict[str, Any] = {
    "pred": np.bool_,
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def size_of(kind: str) -> int:
    """Bytes of a type of PTX."""
    return int(kind[1:]) // 8


def float_bits(value: float) -> int:
    """The bits of an FP32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_f32(values: Array) -> Array:
    """Bits of FP32 values (or of wider ones, rounded)."""
    narrow = np.asarray(values).astype(np.float32)
    bits = narrow.view(np.uint32)
    nan = narrow != narrow
    if nan.any():
        bits = np.where(nan, np.uint32(0x7FFFFFFF), bits)
    return bits


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once: the product is exact in FP64, the sum is rounded to odd there and then to FP32."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    to_odd = even & (error != 0) & np.isfinite(total)
    return np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total)


def halves(bits: Array) -> tuple[Array, Array]:
    """Low and high 16 bits of 32."""
    return bits.astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def pair(low: Array, high: Array) -> Array:
    """32 bits of two times 16."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def bf16_to_f32(half: Array) -> Array:
    """Exact."""
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """To nearest even; every NaN becomes 0x7fff."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f16_to_f32(half: Array) -> Array:
    """Exact."""
    return half.view(np.float16).astype(np.float32)


def f32_to_f16(values: Array) -> Array:
    """To nearest even; every NaN becomes 0x7fff."""
    return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))


@functools.cache
def e4m3_as_f16() -> Array:
    """The F16 of each E4M3."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size = np.where(code & 127 == 127, np.nan, size)
    return f32_to_f16(np.where(code & 128, -size, size).astype(np.float32))


def bf16_max_nan(a: Array, b: Array) -> Array:
    """The larger of two BF16; NaN if one is; -0 lies below +0."""
    x, y = bf16_to_f32(a), bf16_to_f32(b)
    larger = np.where(x == y, a & b, np.where(x > y, a, b))  # equal: the same bits, or zeros of either sign
    return np.where(np.isnan(x) | np.isnan(y), np.uint16(0x7FFF), larger)


def high_half_64(a: Array, b: Array) -> Array:
    """Upper 64 bits of the signed product of two int64."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.astype(np.uint64), np.asarray(b).astype(np.uint64)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    middle_low = (middle & low) + x0 * y1
    unsigned = x1 * y1 + (middle >> shift) + (middle_low >> shift)
    return unsigned - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
