# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of a warp (mma.sync, ldmatrix) and what feeds them: asynchronous copies and conversions.

All of them exist from sm_80 or sm_89 on, so one kernel serves sm_90a, sm_100a and sm_103a. Fragments, for lane `t`
(PTX ISA, "Matrix Fragments for mma.m16n8k16"):

- A, 4 registers of 2 values: (row t/4, k 2(t%4)), (row + 8, same k), (row, k + 8), (row + 8, k + 8);
- B, 2 registers of 2 values: (k 2(t%4), column t/4), (k + 8, same column);
- C, 4 floats: (row t/4, columns 2(t%4) and + 1), (row + 8, same columns).

Shared-memory addresses are `Int32` (the shared window), global addresses `Int64`.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

Words = Sequence[Uint32]
Floats = Sequence[Float32]


def mma_m16n8k16_f16(a: Words, b: Words, c: Floats) -> tuple[Float32, ...]:
    """a b + c with F16 operands and F32 accumulation; any F16, subnormals included."""
    return _mma("f16", a, b, c)


def mma_m16n8k16_bf16(a: Words, b: Words, c: Floats) -> tuple[Float32, ...]:
    """a b + c with BF16 operands and F32 accumulation."""
    return _mma("bf16", a, b, c)


def ldmatrix_x4(addr: Int32) -> tuple[Uint32, ...]:
    """Four 8x8 matrices of 16-bit values: lane 8i + j holds the address of row j of matrix i (16 bytes, aligned).

    Word i of lane t: row t/4, values 2(t%4) and + 1 of matrix i.
    """
    return _ldmatrix("", addr)


def ldmatrix_x4_trans(addr: Int32) -> tuple[Uint32, ...]:
    """As `ldmatrix_x4`, transposed: word i of lane t holds rows 2(t%4) and + 1 of column t/4 of matrix i."""
    return _ldmatrix(".trans", addr)


def cp_async_16_zfill(shared_addr: Int32, addr: Int64, num_bytes: Int32) -> None:
    """Copies 16 bytes past L1 when `num_bytes` is 16, and zeroes them without touching `addr` when it is 0."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared_addr, addr, num_bytes]
    )


def cp_async_8_zfill(shared_addr: Int32, addr: Int64, num_bytes: Int32) -> None:
    """Copies 8 bytes when `num_bytes` is 8, and zeroes them without touching `addr` when it is 0."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 8, {$r2};", read_only_args=[shared_addr, addr, num_bytes]
    )


def cp_async_commit_group() -> None:
    """Closes a group of this thread's copies."""
    cute.arch.inline_ptx("cp.async.commit_group;")


def cp_async_wait_group(pending: int) -> None:
    """Waits until at most `pending` of this thread's groups are under way; others see the data after a barrier."""
    cute.arch.inline_ptx(f"cp.async.wait_group {pending};")


def cvt_e4m3x4_f16x2(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four E4M3 values as F16, exactly: bytes 0 and 1, then bytes 2 and 3."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


def cvt_f16x2_f32(word: Uint32) -> tuple[Float32, Float32]:
    """Two F16 values as F32, exactly; the lower half first."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def cvt_bf16x2_f32(word: Uint32) -> tuple[Float32, Float32]:
    """Two BF16 values as F32, exactly; the lower half first."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 lo, hi; shl.b32 lo, {$r0}, 16; and.b32 hi, {$r0}, 0xffff0000;"
        " mov.b32 {$w0}, lo; mov.b32 {$w1}, hi; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def cvt_rn_f16x2(low: Float32, high: Float32) -> Uint32:
    """Two F32 rounded to F16."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def cvt_rn_bf16x2(low: Float32, high: Float32) -> Uint32:
    """Two F32 rounded to BF16."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def mul_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Product of two pairs of BF16, each rounded."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """The larger of each pair of unsigned 16-bit values."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def prmt(word: Uint32, selector: int) -> Uint32:
    """Bytes of `word` in another order: nibble i of `selector` names the byte that becomes byte i."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector};", write_only_types=[Uint32], read_only_args=[word]
    )


def ex2(value: Float32) -> Float32:
    """2 ** value to 2 ulp; 0 for -inf, NaN for NaN."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def lg2(value: Float32) -> Float32:
    """log2(value); -inf for 0."""
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def f32_bits(value: Float32) -> Uint32:
    """The bits of an F32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def bits_f32(word: Uint32) -> Float32:
    """The F32 with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def _mma(kind: str, a: Words, b: Words, c: Floats) -> tuple[Float32, ...]:
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}},"
        " {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def _ldmatrix(trans: str, addr: Int32) -> tuple[Uint32, ...]:
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )
