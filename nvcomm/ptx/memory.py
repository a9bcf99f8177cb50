# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics on global memory, one function per instruction.

Addresses are `Int64`. Mailboxes are touched through the `relaxed_sys` functions alone (docs/mailbox.md R4), and an
address that came from a multicast object through the `multimem` functions alone (PTX ISA 8.2.3). The weak functions
are for the caller's tensors. A vector access is its scalars in any order (PTX ISA 8.2.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Int64, Uint16, Uint32, Uint64

Words = Sequence[Uint32]


def ld_relaxed_sys(addr: Int64) -> Uint32:
    """One 32-bit word of a mailbox."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr]
    )


def ld_relaxed_sys_v4(addr: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of a mailbox; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def ld_acquire_gpu(addr: Int64) -> Uint32:
    """One 32-bit word of this GPU's memory, ordered before what follows."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr]
    )


def ld_relaxed_gpu(addr: Int64) -> Uint32:
    """One 32-bit word of this rank's own state."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr]
    )


def ld_relaxed_gpu_v4(addr: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of this rank's own state; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def ld_relaxed_gpu_u64(addr: Int64) -> Uint64:
    """64 bits of this rank's own state; `addr` is a multiple of 8."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[addr]
    )


def st_relaxed_sys(addr: Int64, word: Uint32) -> None:
    """One 32-bit word into a mailbox."""
    cute.arch.inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def st_relaxed_sys_v4(addr: Int64, words: Words) -> None:
    """Four words into a mailbox; `addr` is a multiple of 16."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[addr, *words]
    )


def st_release_sys(addr: Int64, word: Uint32) -> None:
    """One 32-bit word, after everything this thread has done before."""
    cute.arch.inline_ptx("st.release.sys.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def st_relaxed_gpu(addr: Int64, word: Uint32) -> None:
    """One 32-bit word of this rank's own state."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def st_relaxed_gpu_u64(addr: Int64, value: Uint64) -> None:
    """64 bits of this rank's own state; `addr` is a multiple of 8."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_release_gpu(addr: Int64, word: Uint32) -> None:
    """One 32-bit word, after everything this thread has done before."""
    cute.arch.inline_ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def multimem_st_relaxed_sys(addr: Int64, word: Uint32) -> None:
    """One word into the same place of every rank's mailbox; `addr` is a multicast address (PTX ISA 8.2.3)."""
    cute.arch.inline_ptx("multimem.st.relaxed.sys.global.f32 [{$r0}], {$r1};", read_only_args=[addr, word])


def multimem_st_relaxed_sys_v4(addr: Int64, words: Words) -> None:
    """Four words into the same place of every rank's mailbox. `.f32` names 32-bit atoms; the bits travel unchanged."""
    cute.arch.inline_ptx(
        "multimem.st.relaxed.sys.global.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[addr, *words]
    )


def ld_weak_v4(addr: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes of a caller's tensor; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[addr]
    )


def st_weak_v4(addr: Int64, words: Words) -> None:
    """16 bytes into a caller's tensor; `addr` is a multiple of 16."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[addr, *words])


# width in bytes -> instruction suffix, register (inline PTX has no 8-bit operand: u8 widens into a 16-bit register)
_NARROW = {8: ("b64", Uint64), 4: ("b32", Uint32), 2: ("b16", Uint16), 1: ("u8", Uint16)}


def ld_weak_if(addr: Int64, offset: int, width: int, inside: Boolean) -> Uint64 | Uint32 | Uint16:
    """`width` (8, 4, 2 or 1) bytes of a caller's tensor at `addr + offset`, or 0 and no access if not `inside`.

    `offset` is a compile-time constant: it costs no register.
    """
    suffix, register = _NARROW[width]
    bits = f"b{register.width}"
    return cute.arch.inline_ptx(
        f"{{{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; mov.{bits} {{$w0}}, 0; "
        f"@p ld.global.{suffix} {{$w0}}, [{{$r0}}+{offset}]; }}}}",
        write_only_types=[register],
        read_only_args=[addr, Uint32(inside)],
    )


def st_weak_if(addr: Int64, offset: int, width: int, inside: Boolean, value: Uint64 | Uint32) -> None:
    """The low `width` (8, 4, 2 or 1) bytes of `value` into a caller's tensor at `addr + offset`, if `inside`."""
    suffix, register = _NARROW[width]
    cute.arch.inline_ptx(
        f"st.global.{suffix} [{{$r0}}+{offset}], {{$r1}};", read_only_args=[addr, register(value)], predicate=inside
    )


def atom_add_acq_rel_gpu(addr: Int64, value: Uint32) -> Uint32:
    """Adds and returns the value before; orders this CTA's earlier stores before, later ones after."""
    return cute.arch.inline_ptx(
        "atom.add.acq_rel.gpu.global.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, value],
    )


def atom_add_relaxed_gpu(addr: Int64, value: Uint32) -> Uint32:
    """Adds and returns the value before; orders nothing."""
    return cute.arch.inline_ptx(
        "atom.add.relaxed.gpu.global.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, value],
    )


def atom_cas_relaxed_gpu(addr: Int64, compare: Uint32, value: Uint32) -> Uint32:
    """Stores `value` where the word equals `compare`; returns the value before."""
    return cute.arch.inline_ptx(
        "atom.cas.relaxed.gpu.global.b32 {$w0}, [{$r0}], {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[addr, compare, value],
    )


def red_add_relaxed_gpu(addr: Int64, value: Uint32) -> None:
    """Adds to a counter, nothing returned."""
    cute.arch.inline_ptx("red.add.relaxed.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def red_add_relaxed_gpu_u64(addr: Int64, value: Uint64) -> None:
    """Adds to a 64-bit counter, nothing returned."""
    cute.arch.inline_ptx("red.add.relaxed.gpu.global.u64 [{$r0}], {$r1};", read_only_args=[addr, value])


def red_max_relaxed_gpu(addr: Int64, value: Uint32) -> None:
    """Raises a counter to at least `value`, nothing returned."""
    cute.arch.inline_ptx("red.max.relaxed.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def ld_weak_b32(addr: Int64) -> Uint32:
    """One word of a caller's tensor."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def ld_weak_u16(addr: Int64) -> Uint32:
    """Two bytes of a caller's tensor, zero-extended."""
    return cute.arch.inline_ptx("ld.global.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def st_weak_b32(addr: Int64, word: Uint32) -> None:
    """One word into a caller's tensor."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def ld_relaxed_sys_v4_if(addr: Int64, inside: Boolean, otherwise: Words) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of a mailbox if `inside`, else `otherwise` and no access; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, {$r2}; mov.b32 {$w1}, {$r3};"
        " mov.b32 {$w2}, {$r4}; mov.b32 {$w3}, {$r5};"
        " @p ld.relaxed.sys.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr, Uint32(inside), *otherwise],
    )


def atom_add_relaxed_gpu_if(addr: Int64, value: Uint32, inside: Boolean) -> Uint32:
    """Adds and returns the value before, if `inside`; else 0 and no access. Orders nothing."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r2}, 0; mov.b32 {$w0}, 0;"
        " @p atom.add.relaxed.gpu.global.u32 {$w0}, [{$r0}], {$r1}; }",
        write_only_types=[Uint32],
        read_only_args=[addr, value, Uint32(inside)],
    )


def st_weak_v2(addr: Int64, words: Words) -> None:
    """8 bytes into a caller's tensor; `addr` is a multiple of 8."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1},{$r2}};", read_only_args=[addr, *words])


def ld_weak_v4_if(addr: Int64, inside: Boolean) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes of a caller's tensor if `inside`, else 0 and no access; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; @p ld.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr, Uint32(inside)],
    )


def ld_weak_b32_if(addr: Int64, inside: Boolean) -> Uint32:
    """One word of a caller's tensor if `inside`, else 0 and no access."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[addr, Uint32(inside)],
    )
