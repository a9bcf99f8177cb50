# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a CTA and of its cluster (DSM), cluster barriers, warp exchanges: one function per instruction.

Shared addresses are 32 bits (`Uint32`). Those that `mapa` returns lie in the window `shared::cluster` and are for
the `shared_cluster` functions alone. All accesses here are weak, or relaxed at CTA or cluster scope where they are
atomic: a barrier orders them (`sync_threads` within a CTA, `cluster_arrive_release` and `cluster_wait_acquire`
within a cluster). A CTA may touch another's shared memory only between a first barrier, which says that the other
has started, and a last one, after which the other may have exited.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Uint16, Uint32

Quad = tuple[Uint32, Uint32, Uint32, Uint32]


def shared_base(alignment: int = 128) -> Uint32:
    """The shared address where the dynamic shared memory of this CTA starts."""
    return Uint32(cute.arch.get_dyn_smem(cute.Uint8, alignment=alignment).toint())


def ld_shared(addr: Uint32) -> Uint32:
    """One 32-bit word of this CTA's shared memory."""
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def ld_shared_v4(addr: Uint32) -> Quad:
    """Four words; `addr` is a multiple of 16."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[addr]
    )


def ld_shared_u16(addr: Uint32) -> Uint32:
    """Two bytes, zero-extended."""
    return cute.arch.inline_ptx("ld.shared.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def st_shared(addr: Uint32, word: Uint32) -> None:
    """One 32-bit word into this CTA's shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def st_shared_v4(addr: Uint32, words: Quad) -> None:
    """Four words; `addr` is a multiple of 16."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[addr, *words])


def st_shared_u16(addr: Uint32, value: Uint32) -> None:
    """The low two bytes of `value`."""
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[addr, Uint16(value)])


def red_add_shared(addr: Uint32, value: Uint32) -> None:
    """Adds to a counter of this CTA, nothing returned."""
    cute.arch.inline_ptx("red.relaxed.cta.shared::cta.add.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def atom_add_shared(addr: Uint32, value: Uint32) -> Uint32:
    """Adds to a counter of this CTA and returns the value before."""
    return cute.arch.inline_ptx(
        "atom.relaxed.cta.shared::cta.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, value],
    )


def mapa(addr: Uint32, cluster_rank: Uint32) -> Uint32:
    """The address of the same word in the CTA `cluster_rank` of this cluster (its own rank is allowed)."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, cluster_rank],
    )


def ld_shared_cluster(addr: Uint32) -> Uint32:
    """One word of a CTA of the cluster; `addr` is from `mapa`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr]
    )


def ld_shared_cluster_v4(addr: Uint32) -> Quad:
    """Four words of a CTA of the cluster; `addr` is a multiple of 16 from `mapa`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def st_shared_cluster(addr: Uint32, word: Uint32) -> None:
    """One word into a CTA of the cluster; `addr` is from `mapa`."""
    cute.arch.inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


def red_add_shared_cluster(addr: Uint32, value: Uint32) -> None:
    """Adds to a counter of a CTA of the cluster, nothing returned; `addr` is from `mapa`."""
    cute.arch.inline_ptx("red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def cluster_arrive_release() -> None:
    """Arrives at the cluster barrier, behind all earlier writes; every thread of every CTA does, warps converged."""
    cute.arch.inline_ptx("barrier.cluster.arrive.release.aligned;")


def cluster_arrive_relaxed() -> None:
    """As `cluster_arrive_release`, but orders nothing, and so waits for no store."""
    cute.arch.inline_ptx("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait_acquire() -> None:
    """Waits until all threads of the cluster have arrived; warps converged. Their earlier writes are visible."""
    cute.arch.inline_ptx("barrier.cluster.wait.acquire.aligned;")


def mbarrier_init(addr: Uint32, num_arrivals: int) -> None:
    """Makes the 8 bytes at `addr` an mbarrier in phase 0."""
    cute.arch.inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[addr, Uint32(num_arrivals)])


def fence_mbarrier_init_release_cluster() -> None:
    """Orders this thread's `mbarrier_init` before its next arrival at the cluster barrier."""
    cute.arch.inline_ptx("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive_expect_tx(addr: Uint32, num_bytes: Uint32) -> None:
    """Arrives at an mbarrier of this CTA, which then waits for that many bytes of asynchronous stores too."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[addr, num_bytes]
    )


def mbarrier_wait_parity(addr: Uint32, parity: Uint32 | int) -> None:
    """Waits until the phase of that parity is complete; the asynchronous stores it counted are visible."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [{$r0}], {$r1}; @!p bra WAIT; }",
        read_only_args=[addr, Uint32(parity)],
    )


def st_async_cluster(addr: Uint32, word: Uint32, mbarrier: Uint32) -> None:
    """One word into a CTA of the cluster, counted by an mbarrier there; both addresses are from `mapa`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[addr, word, mbarrier],
    )


def st_async_cluster_v4(addr: Uint32, words: Quad, mbarrier: Uint32) -> None:
    """Four words, 16 bytes for the mbarrier; `addr` is a multiple of 16."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}}, [{$r5}];",
        read_only_args=[addr, *words, mbarrier],
    )


def shfl_idx(value: Uint32, lane: Uint32) -> Uint32:
    """The value of `lane`; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "shfl.sync.idx.b32 {$w0}, {$r0}, {$r1}, 31, 0xffffffff;",
        write_only_types=[Uint32],
        read_only_args=[value, lane],
    )


def shfl_up_add(value: Uint32, distance: int) -> Uint32:
    """`value` plus that of the lane `distance` below, where there is one; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; .reg .pred p; "
        f"shfl.sync.up.b32 t|p, {{$r0}}, {distance}, 0, 0xffffffff; "
        "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$r0}, t; }",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def ballot(predicate: Boolean) -> Uint32:
    """A bit for each lane where `predicate` holds; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; vote.sync.ballot.b32 {$w0}, p, 0xffffffff; }",
        write_only_types=[Uint32],
        read_only_args=[Uint32(predicate)],
    )


def redux_add(value: Uint32) -> Uint32:
    """The sum over the warp, in every lane; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "redux.sync.add.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[value]
    )


def redux_max(value: Uint32) -> Uint32:
    """The largest value of the warp, in every lane; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[value]
    )
