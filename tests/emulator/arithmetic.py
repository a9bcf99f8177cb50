# SPDX-License-Identifier: Apache-2.0
"""What arithmetic instructions compute: for an opcode the kinds of its operands and a function of arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emulator.values import (
    KINDS,
    Array,
    bf16_max_nan,
    bf16_to_f32,
    e4m3_as_f16,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    fma,
    from_f32,
    halves,
    high_half_64,
    pair,
    size_of,
)

Function = Callable[..., Array]
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_DTYPE = {"s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}
_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_PLAIN: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "min": np.minimum, "max": np.maximum, "mov": lambda a: a,
    "popc": lambda a: np.bitwise_count(a),
}  # fmt: skip
_FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma, "min": np.fmin, "max": np.fmax,
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
}  # fmt: skip


def function_of(parts: list[str], count: int) -> tuple[list[str], Function]:
    """How `count` source operands are read, and what is computed of them. `parts`: the opcode between its dots.

    Raises:
        NotImplementedError: an opcode that the emulator does not know.
    """
    name, kind = parts[0], parts[-1]
    known = _of_type(parts, count) or _of_bits(name, kind, count)
    if known is None:
        raise NotImplementedError(f"the emulator does not know {'.'.join(parts)}")
    return known


def _of_type(parts: list[str], count: int) -> tuple[list[str], Function] | None:
    """Opcodes whose operands are of several kinds, or whose kind is no whole number."""
    name, kind = parts[0], parts[-1]
    if name == "selp":
        return ["b" + kind[1:]] * 2 + ["pred"], lambda a, b, p: np.where(p, a, b)
    if name == "setp":
        ordered_ne = kind == "f32" and parts[1] == "ne"  # numpy's is true for NaN
        return [kind] * 2, (lambda a, b: (a < b) | (a > b)) if ordered_ne else _COMPARE[parts[1]]
    if "relu" in parts:
        return [kind] * 2, lambda a, b: np.maximum(_PLAIN[name](a, b), 0)
    if name == "cvt":
        return _convert(parts, count)
    if name == "prmt":
        return ["b32"] * 3, _permute
    if name in ("shl", "shr"):
        return [kind.replace("b", "u"), "u32"], _shift_left if name == "shl" else _shift_right
    if name == "shf":
        return ["b32"] * 3, lambda low, high, n: (high.astype(np.uint64) << 32 | low) << (n & 31) >> 32
    if name in ("mul", "mad") and kind in _WIDER | {"s64": "", "u64": ""}:
        return _multiply(name, parts[1], kind)
    if kind == "f32" and name in _FLOAT:
        function = _FLOAT[name]
        return ["f32"] * count, lambda *given: from_f32(function(*given))
    if kind == "bf16x2" and name == "max":
        return ["b32"] * 2, _of_halves(bf16_max_nan)
    if kind == "bf16x2" and name == "mul":
        return ["b32"] * 2, _of_halves(lambda a, b: f32_to_bf16(bf16_to_f32(a) * bf16_to_f32(b)))
    if kind == "u16x2":
        return ["b32"] * 2, _of_halves(_PLAIN[name])
    return None


def _of_bits(name: str, kind: str, count: int) -> tuple[list[str], Function] | None:
    """Whole numbers and predicates, all operands of one kind."""
    if name in ("div", "rem") and kind in KINDS:
        return [kind] * 2, _divide if name == "div" else lambda a, b: a - _divide(a, b) * b
    if kind == "f32" and name == "mov":
        return ["b32"], _PLAIN[name]
    if kind == "pred" and name == "not":
        return ["pred"], np.logical_not
    return ([kind] * count, _PLAIN[name]) if name in _PLAIN else None


def _divide(a: Array, b: Array) -> Array:
    """Rounded towards zero."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _of_halves(function: Function) -> Function:
    def apply(a: Array, b: Array) -> Array:
        low, high = (function(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        return pair(low, high)

    return apply


def _multiply(name: str, part: str, kind: str) -> tuple[list[str], Function]:
    if part == "wide":
        wide = _DTYPE[_WIDER[kind]]
        if name == "mad":
            return [kind, kind, _WIDER[kind]], lambda a, b, c: a.astype(wide) * b + c
        return [kind, kind], lambda a, b: a.astype(wide) * b
    if part == "hi":
        if kind == "s64":
            return [kind, kind], high_half_64
        return [kind, kind], lambda a, b: a.astype(_DTYPE[_WIDER[kind]]) * b >> 8 * size_of(kind)
    return ([kind] * 3, lambda a, b, c: a * b + c) if name == "mad" else ([kind] * 2, np.multiply)


def _shift_left(value: Array, by: Array) -> Array:
    bits = 8 * value.itemsize
    return np.where(by < bits, value << (by & np.uint32(bits - 1)).astype(value.dtype), value.dtype.type(0))


def _shift_right(value: Array, by: Array) -> Array:
    bits = 8 * value.itemsize
    if value.dtype.kind == "i":
        return value >> np.minimum(by, bits - 1).astype(value.dtype)
    return np.where(by < bits, value >> (by & np.uint32(bits - 1)).astype(value.dtype), value.dtype.type(0))


def _permute(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint64)
    for i in range(4):
        which = (selector >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64)
        result = result | (both >> which * np.uint64(8) & np.uint64(0xFF)) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _convert(parts: list[str], count: int) -> tuple[list[str], Function] | None:
    modifiers, to, source = parts[1:-2], parts[-2], parts[-1]
    if to == "f16x2" and source == "e4m3x2":
        return ["b16"], lambda a: pair(e4m3_as_f16()[a & 0xFF], e4m3_as_f16()[a >> 8])
    if to in ("bf16x2", "f16x2") and source == "f32" and modifiers == ["rn"]:
        down = f32_to_bf16 if to == "bf16x2" else f32_to_f16
        return ["f32"] * count, lambda high, low: pair(down(low), down(high))
    if to == "f32" and source == "f16":
        return ["b16"], lambda half: from_f32(f16_to_f32(half))
    if to == "f32" and source in ("s32", "u32"):
        return [source], from_f32
    if source[0] in "us" and to[0] in "us" and not modifiers:
        target = np.dtype(f"{'i' if to[0] == 's' else 'u'}{size_of(to)}")
        return [source], lambda a: a.astype(target)
    return None


def bf16_unordered(compare: str, a: Array, b: Array) -> Array:
    """`geu` and `gtu` of BF16: true where one is NaN."""
    opposite = {"geu": np.less, "gtu": np.less_equal}[compare]
    return ~opposite(bf16_to_f32(a), bf16_to_f32(b))
