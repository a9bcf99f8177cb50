# SPDX-License-Identifier: Apache-2.0
"""What the CTAs of a row tell each other: the bracket of the k-th key, then their candidates. Inlined.

Both are asynchronous stores, counted by an mbarrier of the destination that is used once per launch. A cluster barrier
with release and acquire would first wait for all memory, and then drop L1, from which hot vectors are read again.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import WARP, SharedLayout, TopkConfig
from decode.topk_keys import Row, max_u32
from nvcomm.ptx import cluster as ptx

# Words of `SharedLayout.counters`: candidates above the threshold and at it, and the places taken in the output.
NUM_ABOVE, NUM_EQUAL, AT_ABOVE, AT_EQUAL = range(4)
BRACKET, CANDIDATES = range(2)  # the mbarriers

# A header: 13 bits candidates above the threshold, 12 bits at it, one bit: the list overflowed.
EQUAL_SHIFT = 13
OVERFLOW_SHIFT = 31


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
            ptx.mbarrier_init(smem + Uint32(layout.barriers + 8 * CANDIDATES), config.cluster)
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


def wait_for(row: Row, which: int) -> None:
    """Waits for what the cluster's CTAs send here."""
    if row.config.cluster == 1:
        cute.arch.sync_threads()
    else:
        ptx.mbarrier_wait_parity(barrier(row, which), 0)


@cute.jit
def note_largest(row: Row, groups: cute.Tensor, tail: Uint32) -> None:
    """Leaves this warp's largest key for `exchange_bracket`, which runs behind a barrier."""
    largest = tail
    for i in range_constexpr(cute.size(groups)):
        largest = max_u32(largest, groups[i])
    largest = ptx.redux_max(largest)
    ptx.st_shared(row.smem + Uint32(row.layout.warp_totals) + Uint32(WARP + row.warp) * 4, largest)


@cute.jit
def exchange_bracket(row: Row, threshold: Uint32) -> tuple[Uint32, Uint32]:
    """The cluster's bracket: the smallest of the CTAs' thresholds, and the largest key of the row.

    Each CTA has at least `quota` groups that reach its own threshold, so at least k elements of the row reach the
    smallest: the k-th largest key is not below it.

    Args:
        row: the row.
        threshold: this CTA's, in warp 0.
    """
    config, layout = row.config, row.layout
    if row.warp == 0:
        largest = Uint32(0)
        if row.lane < config.warps:
            largest = ptx.ld_shared(row.smem + Uint32(layout.warp_totals) + Uint32(WARP + row.lane) * 4)
        largest = ptx.redux_max(largest)
        if row.lane < config.cluster:
            slot = row.smem + Uint32(layout.slots) + Uint32(row.cta) * 4
            word = (threshold << Uint32(16)) | largest
            if const_expr(config.cluster == 1):
                ptx.st_shared(slot, word)
            else:
                ptx.st_async_cluster(
                    ptx.mapa(slot, Uint32(row.lane)), word, ptx.mapa(barrier(row, BRACKET), Uint32(row.lane))
                )
    wait_for(row, BRACKET)
    word = Uint32(0xFFFF0000)
    if row.lane < config.cluster:
        word = ptx.ld_shared(row.smem + Uint32(layout.slots) + Uint32(row.lane) * 4)
    lowest = Uint32(0xFFFF) - ptx.redux_max(Uint32(0xFFFF) - (word >> Uint32(16)))
    return lowest, ptx.redux_max(word & Uint32(0xFFFF))


@cute.jit
def exchange_candidates(
    row: Row, threshold: Uint32, shift: Uint32, num_above: Int32, num_equal: Uint32, overflow: Uint32
) -> Uint32:
    """Sends this CTA's candidate keys to all CTAs, and counts everybody's in this CTA's histogram.

    A bin has 2^shift keys.

    A word counts the candidates of all CTAs in its low half, and those of the CTAs before this one in its high half.
    Returns whether the list of any CTA had overflowed.
    """
    config, layout = row.config, row.layout
    header = Uint32(num_above) | (num_equal << Uint32(EQUAL_SHIFT)) | (overflow << Uint32(OVERFLOW_SHIFT))
    headers = row.smem + Uint32(layout.headers)
    received = row.smem + Uint32(layout.received)
    if const_expr(config.cluster == 1):
        received = row.smem + Uint32(layout.above_key)
        ptx.st_shared(headers, header)
    else:
        num_quads = (num_above + 7) // 8
        if row.thread < config.cluster:
            remote = ptx.mapa(barrier(row, CANDIDATES), Uint32(row.thread))
            ptx.mbarrier_arrive_expect_tx_relaxed_cluster(remote, Uint32(4 + 16 * num_quads))
            ptx.st_async_cluster(ptx.mapa(headers + Uint32(row.cta) * 4, Uint32(row.thread)), header, remote)
        unit = row.thread
        while unit < num_quads * config.cluster:
            dst = Uint32(unit % config.cluster)
            quad = unit // config.cluster
            words = ptx.ld_shared_v4(row.smem + Uint32(layout.above_key) + Uint32(quad) * 16)
            place = received + Uint32(row.cta * config.candidate_capacity * 2 + quad * 16)
            ptx.st_async_cluster_v4(ptx.mapa(place, dst), words, ptx.mapa(barrier(row, CANDIDATES), dst))
            unit = unit + config.threads
    wait_for(row, CANDIDATES)

    # Each warp counts candidates of one CTA.
    warps_each = config.warps // config.cluster
    src = row.warp // warps_each
    count_src = Int32(ptx.ld_shared(headers + Uint32(src) * 4) & Uint32((1 << EQUAL_SHIFT) - 1))
    one = (Uint32(src < row.cta) << Uint32(16)) + 1
    i = (row.warp % warps_each) * WARP + row.lane
    while i < count_src:
        key = ptx.ld_shared_u16(received + Uint32(src * config.candidate_capacity + i) * 2)
        ptx.red_add_shared(row.smem + Uint32(layout.fine) + ((key - threshold) >> shift) * 4, one)
        i = i + warps_each * WARP
    my_header = Uint32(0)
    if row.lane < config.cluster:
        my_header = ptx.ld_shared(headers + Uint32(row.lane) * 4)
        if row.warp == 0:
            equal = (my_header >> Uint32(EQUAL_SHIFT)) & Uint32((1 << (OVERFLOW_SHIFT - EQUAL_SHIFT)) - 1)
            before = (Uint32(row.lane < row.cta) << Uint32(16)) + 1
            ptx.red_add_shared(row.smem + Uint32(layout.fine), equal * before)
    cute.arch.sync_threads()
    return ptx.redux_max(my_header >> Uint32(OVERFLOW_SHIFT))
