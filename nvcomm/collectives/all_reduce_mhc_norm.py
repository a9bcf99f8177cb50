# SPDX-License-Identifier: Apache-2.0
"""The sum over a row that a cluster shares, in one fixed order, so that every rank finds the same bits.

Each warp adds up its lanes by a butterfly and sends the result into the shared memory of every CTA of the cluster, by
asynchronous stores that an mbarrier there counts; when all have come each thread adds up all warps' results. A cluster
barrier would do as well, but its release waits for every store of the row before it: results, clears, publishes.

Two sets of places, each with its mbarrier, alternate from row to row: a warp that sends a row's sums may overtake a
slower one that still reads the row before, but not by two rows, for the row between is complete only when every warp
has sent its own sums of it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from nvcomm.collectives.all_reduce_mhc_config import WARP, MhcConfig
from nvcomm.ptx import arith, cluster, mma

FLOAT_BYTES = 4
MBARRIER_BYTES = 8


def shared_bytes(config: MhcConfig) -> int:
    """Bytes of shared memory that a CTA needs: two sets of sums, each padded to whole 16 bytes, and their mbarriers."""
    return 2 * (_set_bytes(config) + MBARRIER_BYTES)


def _set_bytes(config: MhcConfig) -> int:
    return -(-config.partial_sums // 4) * 4 * FLOAT_BYTES


def _mbarrier(config: MhcConfig, base: Uint32, which: Uint32 | int) -> Uint32:
    """The mbarrier of a set."""
    return base + Uint32(2 * _set_bytes(config)) + Uint32(which) * Uint32(MBARRIER_BYTES)


@cute.jit
def start(config: cutlass.Constexpr, base: Uint32, thread: Int32) -> None:
    """Says that this CTA runs and its mbarriers stand: nobody may write into its shared memory before."""
    if const_expr(config.cluster > 1):
        if thread == 0:
            for which in range_constexpr(2):
                cluster.mbarrier_init(_mbarrier(config, base, which), 1)
            cluster.fence_mbarrier_init_release_cluster()
        cluster.cluster_arrive_relaxed()


@cute.jit
def started(config: cutlass.Constexpr) -> None:
    """Waits until all CTAs of the cluster run; once, after `start`."""
    if const_expr(config.cluster > 1):
        cluster.cluster_wait_acquire()


@cute.jit
def row_sum(
    config: cutlass.Constexpr, base: Uint32, index: Uint32, cta: Int32, thread: Int32, value: Float32
) -> Float32:
    """Sum of `value` over the threads of a cluster; every thread of it calls this.

    Args:
        config: of the kernel.
        base: this CTA's shared memory, `shared_bytes` of it.
        index: 0, 1, 2, ... row by row.
        cta: rank of this CTA in its cluster.
        thread: index of the thread in its CTA.
        value: what it adds.
    """
    lane = thread % WARP
    for step in range_constexpr(5):
        value = arith.add_rn(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step))
    which = index & Uint32(1)
    place = base + which * Uint32(_set_bytes(config))
    own = place + Uint32(cta * (config.threads // WARP) + thread // WARP) * Uint32(FLOAT_BYTES)
    if const_expr(config.cluster > 1):
        mbarrier = _mbarrier(config, base, which)
        if thread == 0:
            cluster.mbarrier_arrive_expect_tx(mbarrier, Uint32(config.partial_sums * FLOAT_BYTES))
        if lane < config.cluster:
            to = Uint32(lane)
            cluster.st_async_cluster(cluster.mapa(own, to), arith.f32_bits(value), cluster.mapa(mbarrier, to))
        cluster.mbarrier_wait_parity(mbarrier, (index >> Uint32(1)) & Uint32(1))
    else:
        if lane == 0:
            cluster.st_shared(own, arith.f32_bits(value))
        cute.arch.sync_threads()
    sums: list[Float32] = []
    for i in range_constexpr(0, config.partial_sums, 4):
        four = cluster.ld_shared_v4(place + Uint32(i * FLOAT_BYTES))
        sums.extend(mma.bits_f32(word) for word in four[: config.partial_sums - i])
    return _pairwise(sums)


def _pairwise(values: list[Float32]) -> Float32:
    while len(values) > 1:
        pairs = [arith.add_rn(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]
