# SPDX-License-Identifier: Apache-2.0
"""What the arithmetic instructions do to the threads of a cluster: see `ptx_warps`. Registers hold bits as uint64."""

from __future__ import annotations

import functools
import re

import numpy as np

U32, U64 = np.uint32, np.uint64


# --- values -----------------------------------------------------------------------------------------------------------
def vector(operand):
    return [one.strip() for one in operand.strip("{}").split(",")]


def f32(bits):
    return bits.astype(U32).view(np.float32)


def from_f32(values):
    return np.asarray(values, np.float32).view(U32).astype(U64)


def signed(bits, width):
    return bits.astype(U32).view(np.int32).astype(np.int64) if width == 32 else bits.view(np.int64)


def clip(values, width):
    return values.astype(np.int64).view(U64) & U64((1 << width) - 1 if width < 64 else 0xFFFFFFFFFFFFFFFF)


def halves(bits):
    return bits & U64(0xFFFF), (bits >> U64(16)) & U64(0xFFFF)


def bf16_to_f32(half):
    return (half.astype(U32) << U32(16)).view(np.float32)


def f32_to_bf16(values):
    bits = np.asarray(values, np.float32).view(U32).astype(U64)
    rounded = (bits + U64(0x7FFF) + ((bits >> U64(16)) & U64(1))) >> U64(16)
    return np.where(np.isnan(values), U64(0x7FFF), rounded)


def f16_to_f32(half):
    return half.astype(np.uint16).view(np.float16).astype(np.float32)


def f32_to_f16(values):
    return np.asarray(values, np.float32).astype(np.float16).view(np.uint16).astype(U64)


@functools.cache
def e4m3_table():
    """The F16 of each E4M3."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size = np.where(code & 127 == 127, np.nan, size)
    return f32_to_f16(np.where(code & 128, -size, size))


# --- arithmetic -------------------------------------------------------------------------------------------------------
def width_of(parts):
    return int(re.sub(r"\D", "", parts[-1]) or 32) if parts[-1] != "pred" else 1


def integers(function):
    def handler(c, s, parts, active, pc):
        width = width_of(parts)
        operands = [c.value(one) for one in s.operands[1:]]
        if parts[-1].startswith("s"):
            operands = [signed(one, width) for one in operands]
        c.store(s.operands[0], clip(function(*operands), width), active)

    return handler


def floats(function):
    def handler(c, s, parts, active, pc):
        c.store(s.operands[0], from_f32(function(*(f32(c.value(one)) for one in s.operands[1:]))), active)

    return handler


def by_type(for_integers, for_floats):
    def handler(c, s, parts, active, pc):
        (for_floats if parts[-1] == "f32" else for_integers)(c, s, parts, active, pc)

    return handler


def bitwise(function):
    def handler(c, s, parts, active, pc):
        c.store(s.operands[0], function(*(c.value(one) for one in s.operands[1:])), active)

    return handler


def shift(c, s, parts, active, pc):
    value, by = c.value(s.operands[1]), np.minimum(c.value(s.operands[2]) & U64(0xFFFFFFFF), U64(63))
    width = width_of(parts)
    if parts[0] == "shl":
        result = value << by
    elif parts[-1].startswith("s"):
        result = signed(value, width) >> by.astype(np.int64)
    else:
        result = (value & U64(0xFFFFFFFF) if width == 32 else value) >> by
    c.store(s.operands[0], clip(result, width), active)


def funnel_shift(c, s, parts, active, pc):
    low, high, by = (c.value(one) & U64(0xFFFFFFFF) for one in s.operands[1:])
    both = (high << U64(32)) | low
    c.store(s.operands[0], (both << (by & U64(31))) >> U64(32), active)


def multiply(c, s, parts, active, pc):
    kind, width = parts[1], width_of(parts)
    if parts[-1] == "f32":
        return floats(lambda a, b: a * b)(c, s, parts, active, pc)
    if parts[-1] == "bf16x2":
        pairs = zip(halves(c.value(s.operands[1])), halves(c.value(s.operands[2])), strict=True)
        low, high = (f32_to_bf16(bf16_to_f32(a) * bf16_to_f32(b)) for a, b in pairs)
        return c.store(s.operands[0], low | (high << U64(16)), active)
    a, b = (c.value(one) for one in s.operands[1:3])
    if parts[-1].startswith("s") or kind == "lo":
        a, b = signed(a, width), signed(b, width)
    else:
        a, b = (one & U64(0xFFFFFFFF) for one in (a, b))
    product = (a * b) >> 32 if kind == "hi" else a * b
    if parts[0] == "mad":
        wide = 64 if kind == "wide" else width
        product = clip(product, wide) + c.value(s.operands[3])
        return c.store(s.operands[0], clip(product, wide), active)
    return c.store(s.operands[0], clip(product, 64 if kind == "wide" else width), active)


def maximum(c, s, parts, active, pc):
    smaller = parts[0] == "min"
    if parts[-1] == "u16x2":
        pairs = zip(halves(c.value(s.operands[1])), halves(c.value(s.operands[2])), strict=True)
        low, high = (np.maximum(a, b) for a, b in pairs)
        return c.store(s.operands[0], low | (high << U64(16)), active)
    if parts[-1] == "f32":
        return floats(np.fmin if smaller else np.fmax)(c, s, parts, active, pc)
    return integers(np.minimum if smaller else np.maximum)(c, s, parts, active, pc)


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(c, s, parts, active, pc):
    a, b = (c.value(one) for one in s.operands[1:])
    if parts[2] == "f32":
        a, b = f32(a), f32(b)
    elif parts[2].startswith("s"):
        a, b = (signed(one, width_of(parts)) for one in (a, b))
    else:
        a, b = (one & U64((1 << width_of(parts)) - 1 if width_of(parts) < 64 else 2**64 - 1) for one in (a, b))
    c.store(s.operands[0], COMPARE[parts[1]](a, b), active)


def select(c, s, parts, active, pc):
    a, b, which = (c.value(one) for one in s.operands[1:])
    c.store(s.operands[0], np.where(which, a, b), active)


def permute(c, s, parts, active, pc):
    word, selector = c.value(s.operands[1]), int(s.operands[3], 0)
    result = np.zeros_like(word)
    for i in range(4):
        byte = (word >> U64(8 * (selector >> 4 * i & 15))) & U64(0xFF)
        result |= byte << U64(8 * i)
    c.store(s.operands[0], result, active)


def move(c, s, parts, active, pc):
    target, source = s.operands
    width = width_of(parts)
    if target.startswith("{"):
        for i, name in enumerate(vector(target)):
            c.store(name, clip(c.value(source) >> U64(i * width // 2), width // 2), active)
    elif source.startswith("{"):
        low, high = (c.value(name) for name in vector(source))
        c.store(target, low | (high << U64(width // 2)), active)
    elif parts[-1] == "pred":
        c.store(target, c.value(source) != 0, active)
    else:
        c.store(target, clip(c.value(source), width), active)


def convert(c, s, parts, active, pc):
    kind = ".".join(parts[1:])
    values = [c.value(one) for one in s.operands[1:]]
    if kind in {"u64.u32", "u32.u64"}:
        result = values[0] & U64(0xFFFFFFFF)
    elif kind == "s64.s32":
        result = clip(signed(values[0], 32), 64)
    elif kind == "rn.f16x2.e4m3x2":
        table = e4m3_table()
        result = table[values[0] & U64(0xFF)] | (table[(values[0] >> U64(8)) & U64(0xFF)] << U64(16))
    elif kind == "f32.f16":
        result = from_f32(f16_to_f32(values[0]))
    elif kind in {"rn.f16x2.f32", "rn.bf16x2.f32"}:
        down = f32_to_f16 if "bf16" not in kind else f32_to_bf16
        high, low = (down(f32(one)) for one in values)
        result = low | (high << U64(16))
    else:
        raise AssertionError(f"unknown conversion {s.opcode}")
    c.store(s.operands[0], result, active)


ARITHMETIC = {
    "add": by_type(integers(lambda a, b: a + b), floats(lambda a, b: a + b)),
    "sub": by_type(integers(lambda a, b: a - b), floats(lambda a, b: a - b)),
    "mul": multiply, "mad": multiply, "max": maximum, "min": maximum,
    "fma": floats(lambda a, b, d: (a.astype(np.float64) * b + d).astype(np.float32)),
    "ex2": floats(np.exp2), "lg2": floats(np.log2), "rcp": floats(lambda a: 1 / a),
    "and": bitwise(lambda a, b: a & b), "or": bitwise(lambda a, b: a | b), "xor": bitwise(lambda a, b: a ^ b),
    "not": integers(lambda a: ~a), "shl": shift, "shr": shift, "shf": funnel_shift, "prmt": permute,
    "setp": compare, "selp": select, "mov": move, "cvt": convert,
}  # fmt: skip
