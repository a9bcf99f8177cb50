# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of floats and bytes on shared memory; words, the cluster and its barrier are in `cluster`."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32


def ld_shared_v4_f32(addr: Int32) -> tuple[Float32, ...]:
    """Four floats of this CTA's shared memory; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[addr]
    )


def ld_shared_v2_f32(addr: Int32) -> tuple[Float32, Float32]:
    """Two floats; `addr` is a multiple of 8."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[addr]
    )


def ld_shared_f32(addr: Int32) -> Float32:
    """One float."""
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def ld_shared_u8(addr: Int32) -> Uint32:
    """One byte, zero-extended."""
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def st_shared_f32(addr: Int32, value: Float32, predicate: Boolean | None = None) -> None:
    """One float into this CTA's shared memory."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, value], predicate=predicate)


def st_shared_v2(addr: Int32, words: Sequence[Uint32], predicate: Boolean | None = None) -> None:
    """Two words; `addr` is a multiple of 8."""
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1},{$r2}};", read_only_args=[addr, *words], predicate=predicate)


def st_shared_v4_f32(addr: Int32, values: Sequence[Float32]) -> None:
    """Four floats; `addr` is a multiple of 16."""
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[addr, *values])


def st_shared_v2_f32(addr: Int32, values: Sequence[Float32], predicate: Boolean) -> None:
    """Two floats; `addr` is a multiple of 8."""
    cute.arch.inline_ptx(
        "st.shared.v2.f32 [{$r0}], {{$r1},{$r2}};", read_only_args=[addr, *values], predicate=predicate
    )


def st_async_cluster_v2_f32(addr: Int32, values: Sequence[Float32], mbarrier: Int32, predicate: Boolean) -> None:
    """Two floats into a CTA of the cluster, 8 bytes for the mbarrier there; both addresses are from `cluster.mapa`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r1},{$r2}}, [{$r3}];",
        read_only_args=[addr, *values, mbarrier],
        predicate=predicate,
    )
