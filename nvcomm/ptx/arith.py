# SPDX-License-Identifier: Apache-2.0
"""FP32 arithmetic whose roundings are part of a contract: one function per instruction.

An instruction with `.rn` is never contracted: a product and a sum stay two roundings, an fma stays one. None of them
flushes subnormals.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32


def add_rn(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a * b."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def rsqrt(a: Float32) -> Float32:
    """1 / sqrt(a), to 2 units in the last place."""
    return cute.arch.inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def f32_bits(value: Float32) -> Uint32:
    """The bits of an FP32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def select(condition: Boolean, a: Float32, b: Float32) -> Float32:
    """`a` where `condition` holds, else `b`; neither is computed with."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Float32],
        read_only_args=[Uint32(condition), a, b],
    )
