# SPDX-License-Identifier: Apache-2.0
"""What the CTAs of a row tell each other: the bracket of the k-th key, then how many candidates each key has. Inlined.

Both are asynchronous stores, counted by an mbarrier of the destination that is used once per launch. A cluster barrier
with release and acquire would first wait for all memory, and then drop L1, from which hot vectors are read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import FINE_BINS, SharedLayout, TopkConfig
from decode.topk_row import Row
from nvcomm.ptx import cluster as ptx

# Words of `SharedLayout.counters`: listed candidates above the threshold and at it, and the places taken in the output.
NUM_ABOVE, NUM_EQUAL, AT_ABOVE, AT_EQUAL = range(4)
BRACKET, COUNTS = range(2)  # the mbarriers
BINS_OF_STORE = 8  # 16 bytes, 16 bits a bin


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

    def fine_bin(self, key: Uint32) -> Uint32:
        """The bin of a key of the bracket in the fine histogram."""
        return (self.largest - key) >> self.shift


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
            ptx.mbarrier_init(smem + Uint32(layout.barriers + 8 * COUNTS), 1)
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
def exchange_counts(row: Row, bracket: Bracket) -> None:
    """Sends this CTA's histogram of candidates, as far as it is used, to all CTAs of the row. Called by all threads.

    Warp 0 alone may look at what has come here, after `wait_for_counts`.
    """
    config, layout = row.config, row.layout
    cute.arch.sync_threads()
    if const_expr(config.cluster > 1):
        num_stores = bracket.fine_bin(bracket.threshold) // BINS_OF_STORE + 1
        if row.thread == 0:
            expected = (num_stores * 16 + 4) * config.cluster
            ptx.mbarrier_arrive_expect_tx(barrier(row, COUNTS), expected)
        unit = Uint32(row.thread)
        while unit < num_stores * config.cluster:
            dst = unit % config.cluster
            store = unit // config.cluster
            at = row.smem + Uint32(layout.fine) + store * (4 * BINS_OF_STORE)
            a, b, c, d = ptx.ld_shared_v4(at)
            e, f, g, h = ptx.ld_shared_v4(at + 16)
            words = (pack(a, b), pack(c, d), pack(e, f), pack(g, h))
            place = row.smem + Uint32(layout.received + 2 * FINE_BINS * row.cta) + store * 16
            ptx.st_async_cluster_v4(ptx.mapa(place, dst), words, ptx.mapa(barrier(row, COUNTS), dst))
            unit = unit + config.threads
        if row.thread < config.cluster:
            place = row.smem + Uint32(layout.slots) + Uint32(16 + row.cta) * 4
            dst = Uint32(row.thread)
            num_above = ptx.ld_shared(counter(row, NUM_ABOVE))
            ptx.st_async_cluster(ptx.mapa(place, dst), num_above, ptx.mapa(barrier(row, COUNTS), dst))


def pack(low: Uint32, high: Uint32) -> Uint32:
    """Two counts of less than 2^16 in a word."""
    return low | (high << Uint32(16))


@cute.jit
def wait_for_counts(row: Row) -> Uint32:
    """Waits until all of the row's candidates have been counted here; returns whether any CTA's list overflowed."""
    num_above = Uint32(0)
    if const_expr(row.config.cluster == 1):
        num_above = ptx.ld_shared(counter(row, NUM_ABOVE))
    else:
        ptx.mbarrier_wait_parity(barrier(row, COUNTS), 0)
        if row.lane < row.config.cluster:
            num_above = ptx.ld_shared(row.smem + Uint32(row.layout.slots) + Uint32(16 + row.lane) * 4)
    return Uint32(ptx.redux_max(num_above) > row.config.candidate_capacity)
