# SPDX-License-Identifier: Apache-2.0
"""What the CTAs of a row tell each other: the bracket of the k-th key, then how many candidates each key has. Inlined.

Both are asynchronous, counted by an mbarrier of the destination that is used once per launch. A cluster barrier
with release and acquire would first wait for all memory, and then drop L1, from which hot vectors are read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import FINE_BINS, WARP, SharedLayout, TopkConfig
from decode.topk_keys import Row
from nvcomm.ptx import cluster as ptx

# Words of `SharedLayout.counters`: candidates above the threshold and at it, the places taken in the output, and
# whether the list of any CTA of the cluster has overflowed.
NUM_ABOVE, NUM_EQUAL, AT_ABOVE, AT_EQUAL, OVERFLOW = range(5)
BRACKET, CANDIDATES = range(2)  # the mbarriers


@dataclass(frozen=True)
class Bracket:
    """What bounds the k-th largest key of a row, the same in all of its CTAs.

    Attributes:
        threshold: at least k elements of the row reach this key.
        largest: the largest key of the row.
        shift: the fine histogram has 2^shift keys a bin, from `largest` down.
    """

    threshold: Uint32
    largest: Uint32
    shift: Uint32


@cute.jit
def prepare(config: TopkConfig, smem: Uint32, thread: Int32) -> None:
    """Zeros and mbarriers, then this CTA's arrival at the cluster's first barrier. Touches no global memory."""
    layout = SharedLayout(config)
    for i in range_constexpr(-(-layout.zeroed_bytes // (16 * config.threads))):
        at = (i * config.threads + thread) * 16
        if at < layout.zeroed_bytes:
            ptx.st_shared_v4(smem + Uint32(at), (Uint32(0),) * 4)
    if const_expr(config.cluster > 1):
        if thread == 0:
            ptx.mbarrier_init(smem + Uint32(layout.barriers + 8 * BRACKET), 1)
            ptx.mbarrier_init(smem + Uint32(layout.barriers + 8 * CANDIDATES), config.cluster * config.warps)
            ptx.fence_mbarrier_init_release_cluster()
            ptx.mbarrier_arrive_expect_tx(smem + Uint32(layout.barriers + 8 * BRACKET), Uint32(4 * config.cluster))
        ptx.cluster_arrive_release()


def counter(row: Row, which: int) -> Uint32:
    """Shared address of a counter."""
    return row.smem + Uint32(row.layout.counters + 4 * which)


def barrier(row: Row, which: int) -> Uint32:
    """Shared address of an mbarrier."""
    return row.smem + Uint32(row.layout.barriers + 8 * which)


def cluster_sync(row: Row) -> None:
    """A barrier over the row's CTAs; writes before it, remote ones too, are visible after it."""
    if row.config.cluster == 1:
        cute.arch.sync_threads()
    else:
        ptx.cluster_arrive_release()
        ptx.cluster_wait_acquire()


@cute.jit
def exchange_bracket(row: Row, threshold: Uint32, largest: Uint32) -> Bracket:
    """The smallest of the CTAs' thresholds, and the largest key of the row.

    Each CTA has at least `quota` groups that reach its own threshold, so at least k elements of the row reach the
    smallest: the k-th largest key is not below it.

    Args:
        row: the row.
        threshold: this CTA's, in warp 0.
        largest: this CTA's, in warp 0.
    """
    config, layout = row.config, row.layout
    slots = row.smem + Uint32(layout.slots)
    if (row.warp == 0) & (row.lane < config.cluster):
        slot = slots + Uint32(row.cta) * 4
        word = (threshold << Uint32(16)) | largest
        if const_expr(config.cluster == 1):
            ptx.st_shared(slot, word)
        else:
            remote = ptx.mapa(barrier(row, BRACKET), Uint32(row.lane))
            ptx.st_async_cluster(ptx.mapa(slot, Uint32(row.lane)), word, remote)
    if const_expr(config.cluster == 1):
        cute.arch.sync_threads()
    else:
        ptx.mbarrier_wait_parity(barrier(row, BRACKET), 0)
    word = Uint32(0xFFFF0000)
    if row.lane < config.cluster:
        word = ptx.ld_shared(slots + Uint32(row.lane) * 4)
    lowest = Uint32(0xFFFF) - ptx.redux_max(Uint32(0xFFFF) - (word >> Uint32(16)))
    highest = ptx.redux_max(word & Uint32(0xFFFF))
    shift = Uint32(0)
    for bits in range_constexpr(FINE_BINS.bit_length() - 1, 16):
        shift = shift + Uint32(((highest - lowest) >> Uint32(bits)) != 0)
    return Bracket(lowest, highest, shift)


@cute.jit
def count_everywhere(row: Row, dst: Uint32, offset: Uint32, count: Uint32) -> None:
    """Adds `count` to the word at `offset` of CTA `dst`: low half for all, high half if this CTA comes before it."""
    word = count * ((Uint32(Uint32(row.cta) < dst) << Uint32(16)) + 1)
    if const_expr(row.config.cluster == 1):
        ptx.red_add_shared(row.smem + offset, word)
    else:
        remote = ptx.mapa(barrier(row, CANDIDATES), dst)
        ptx.red_async_add_cluster(ptx.mapa(row.smem + offset, dst), word, remote)


@cute.jit
def count_candidates(row: Row, bracket: Bracket, begin: Uint32, end: Uint32) -> None:
    """Counts a warp's candidates, those from `begin` to `end` of this CTA's list, in all CTAs of the row."""
    config, layout = row.config, row.layout
    unit = begin * config.cluster + Uint32(row.lane)
    while unit < end * config.cluster:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + unit // config.cluster * 2)
        offset = Uint32(layout.fine) + ((bracket.largest - key) >> bracket.shift) * 4
        count_everywhere(row, unit % config.cluster, offset, Uint32(1))
        unit = unit + WARP


@cute.jit
def count_in_lanes(row: Row, offset: Uint32, count: Uint32) -> None:
    """`count_everywhere` for all CTAs of the row, a lane each."""
    if row.lane < row.config.cluster:
        count_everywhere(row, Uint32(row.lane), offset, count)


@cute.jit
def wait_for_counts(row: Row, num_sent: Int32) -> None:
    """Waits until everybody's candidates have been counted here; this CTA's own lists are complete too.

    Args:
        row: the row.
        num_sent: counts that this warp has sent to each CTA.
    """
    if const_expr(row.config.cluster > 1):  # noqa: SIM102
        if row.lane < row.config.cluster:
            remote = ptx.mapa(barrier(row, CANDIDATES), Uint32(row.lane))
            ptx.mbarrier_arrive_expect_tx_relaxed_cluster(remote, Uint32(4 * num_sent))
    cute.arch.sync_threads()
    if const_expr(row.config.cluster > 1):
        ptx.mbarrier_wait_parity(barrier(row, CANDIDATES), 0)
