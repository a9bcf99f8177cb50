# SPDX-License-Identifier: Apache-2.0
"""The fast path of a row: stream for group maxima, bracket, harvest candidates, select among them. Inlined.

The row is read from memory once. What a thread keeps of a batch of 8 vectors is one maximum; only batches whose
maximum reaches the threshold are read again, a few percent, out of L1 or L2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from decode.topk_config import FINEST_BINS, HOT_CAPACITY, UNROLL, VECTOR_BYTES, WARP, SharedLayout, TopkConfig
from decode.topk_find import find_from_top
from decode.topk_keys import (
    MIN_KEY,
    NEG_INF_PAIR,
    Quad,
    Row,
    keys_of_words,
    ld_vector_below,
    max_nan_pair,
    max_of_pair,
    order_key,
    vector_address,
    vector_at,
)
from nvcomm.ptx import cluster as ptx
from nvcomm.ptx import memory

# Words of `SharedLayout.counters`.
NUM_HOT, NUM_ABOVE, NUM_EQUAL, AT_ABOVE, AT_EQUAL, OVERFLOW = range(6)
# The mbarriers of `SharedLayout.barriers`; each is used for one phase of one launch.
BRACKET, CANDIDATES = range(2)


def counter(row: Row, which: int) -> Uint32:
    """Shared address of a counter."""
    return row.smem + Uint32(row.layout.counters + 4 * which)


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


def cluster_sync(row: Row) -> None:
    """A barrier over the row's CTAs; writes before it, remote ones too, are visible after it."""
    if row.config.cluster == 1:
        cute.arch.sync_threads()
    else:
        ptx.cluster_arrive_release()
        ptx.cluster_wait_acquire()


def barrier(row: Row, which: int) -> Uint32:
    """Shared address of an mbarrier."""
    return row.smem + Uint32(row.layout.barriers + 8 * which)


def wait_for(row: Row, which: int) -> None:
    """Waits for the words that the cluster's CTAs send here.

    An mbarrier orders these words alone. A cluster barrier with release and acquire would first wait for all
    memory, and then drop L1, from which the hot batches are about to be read.
    """
    if row.config.cluster == 1:
        cute.arch.sync_threads()
    else:
        ptx.mbarrier_wait_parity(barrier(row, which), 0)


def add_everywhere(row: Row, offset: Uint32, dst: Int32, count: Uint32) -> None:
    """Adds `count` to the word at `offset` of CTA `dst`: low half for all, high half if this CTA comes before it."""
    before = Uint32(row.cta < dst) << Uint32(16)
    ptx.red_add_shared_cluster(ptx.mapa(row.smem + offset, Uint32(dst)), count * (before + 1))


def send_count(row: Row, offset: Uint32, dst: Int32, count: Uint32) -> None:
    """`add_everywhere`, counted by the mbarrier of the candidates."""
    if row.config.cluster == 1:
        ptx.red_add_shared(row.smem + offset, count)
    else:
        before = Uint32(row.cta < dst) << Uint32(16)
        remote = ptx.mapa(barrier(row, CANDIDATES), Uint32(dst))
        ptx.red_async_add_cluster(ptx.mapa(row.smem + offset, Uint32(dst)), count * (before + 1), remote)


def fold(row: Row, words: list[Quad]) -> list[Uint32]:
    """The maxima of a batch, one pair a register: by place in the vector, or in block mode by step."""
    count = row.config.accumulators
    folded: list[Uint32 | None] = [None] * count
    for step, quad in enumerate(words):
        for place, word in enumerate(quad):
            i = step % count if row.config.mode == "blocks" else place * count // len(quad)
            folded[i] = word if folded[i] is None else max_nan_pair(folded[i], word)
    return folded


@cute.jit
def stream(row: Row, groups: cute.Tensor) -> Int32:
    """Reads the row once: one key per (batch, thread) to shared memory, this thread's group maxima to `groups`.

    Groups are disjoint sets of elements: a thread's columns at the same places of its vectors, or in block mode its
    vectors of every n-th step. Returns the number of batches.
    """
    config = row.config
    num_best = config.accumulators
    batch_vectors = config.step_vectors * UNROLL
    num_batches = (row.num_vectors + batch_vectors - 1) // batch_vectors
    best = cute.make_rmem_tensor((num_best,), Uint32)
    maxima = cute.make_rmem_tensor((num_best,), Uint32)
    for i in range_constexpr(num_best):
        best[i] = Uint32(NEG_INF_PAIR)
    for batch in cutlass.range(num_batches, unroll=1):
        vector = vector_at(row, batch, Int32(0), row.thread)
        addr = vector_address(row, vector)
        if vector + (UNROLL - 1) * config.step_vectors < row.num_vectors:
            load_batch(row, maxima, addr)
        else:
            load_last_batch(row, maxima, addr, vector)
        pair = maxima[0]
        for i in range_constexpr(1, num_best):
            pair = max_nan_pair(pair, maxima[i])
        at = row.smem + Uint32(row.layout.batch_keys) + Uint32(batch * config.threads + row.thread) * 2
        ptx.st_shared_u16(at, order_key(max_of_pair(pair)))
        for i in range_constexpr(num_best):
            best[i] = max_nan_pair(best[i], maxima[i])
    for i in range_constexpr(num_best):
        if const_expr(cute.size(groups) == num_best):
            groups[i] = order_key(max_of_pair(best[i]))
        else:
            groups[2 * i] = order_key(best[i] & Uint32(0xFFFF))
            groups[2 * i + 1] = order_key(best[i] >> Uint32(16))
    return num_batches


@cute.jit
def load_batch(row: Row, maxima: cute.Tensor, addr: Int64) -> None:
    """A batch that exists as a whole: 8 loads in flight, then their maxima."""
    stride = row.config.step_vectors * VECTOR_BYTES
    folded = fold(row, [memory.ld_weak_v4(addr + Int64(u * stride)) for u in range(UNROLL)])
    for i in range_constexpr(row.config.accumulators):
        maxima[i] = folded[i]


@cute.jit
def load_last_batch(row: Row, maxima: cute.Tensor, addr: Int64, vector: Int32) -> None:
    """A batch of which some vectors lie past the end of the row."""
    step = row.config.step_vectors
    words = [
        ld_vector_below(addr + Int64(u * step * VECTOR_BYTES), vector + u * step, row.num_vectors)
        for u in range(UNROLL)
    ]
    folded = fold(row, words)
    for i in range_constexpr(row.config.accumulators):
        maxima[i] = folded[i]


def max_u32(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two."""
    return cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


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
def harvest(row: Row, threshold: Uint32, num_batches: Int32, tail: Uint32) -> None:
    """Collects this CTA's elements above the threshold, and up to k of those at it, in shared memory.

    Counters go on past the capacities: an overflow is seen, and nothing is written past the end.
    """
    config, layout = row.config, row.layout
    for batch in cutlass.range(num_batches, unroll=1):
        pair = batch * config.threads + row.thread
        if ptx.ld_shared_u16(row.smem + Uint32(layout.batch_keys) + Uint32(pair) * 2) >= threshold:
            at = ptx.atom_add_shared(counter(row, NUM_HOT), Uint32(1))
            if at < HOT_CAPACITY:
                ptx.st_shared_u16(row.smem + Uint32(layout.groups) + at * 2, Uint32(pair))
    cute.arch.sync_threads()
    num_hot = Int32(ptx.ld_shared(counter(row, NUM_HOT)))
    if num_hot > HOT_CAPACITY:
        num_hot = Int32(HOT_CAPACITY)
    # A batch has 8 vectors, of which a short row uses the first alone.
    num_steps = (row.num_vectors + config.step_vectors - 1) // config.step_vectors
    step_bits = Int32(num_steps > 1) + Int32(num_steps > 2) + Int32(num_steps > 4)
    unit = row.thread
    while unit < (num_hot << step_bits):
        pair = Int32(ptx.ld_shared_u16(row.smem + Uint32(layout.groups) + Uint32(unit >> step_bits) * 2))
        step = unit & ((Int32(1) << step_bits) - 1)
        vector = vector_at(row, pair // config.threads, step, pair % config.threads)
        if vector < row.num_vectors:
            keys = keys_of_words(row, memory.ld_weak_v4(vector_address(row, vector)))
            keep(row, keys, vector * row.elements, threshold)
        unit = unit + config.threads
    if tail != 0:
        keep(row, [tail], row.num_vectors * row.elements + row.thread, threshold)
    cute.arch.sync_threads()


@cute.jit
def keep(row: Row, keys: list[Uint32], first: Int32, threshold: Uint32) -> None:
    """Appends those of consecutive elements, the first of them `first`, that reach the threshold."""
    config, layout = row.config, row.layout
    num_above = Uint32(0)
    num_equal = Uint32(0)
    for i in range_constexpr(len(keys)):
        num_above = num_above + Uint32(keys[i] > threshold)
        num_equal = num_equal + Uint32(keys[i] == threshold)
    if num_above > 0:
        at = ptx.atom_add_shared(counter(row, NUM_ABOVE), num_above)
        for i in range_constexpr(len(keys)):
            if keys[i] > threshold:
                if at < config.candidate_capacity:
                    ptx.st_shared(row.smem + Uint32(layout.above_index) + at * 4, Uint32(first + i))
                    ptx.st_shared_u16(row.smem + Uint32(layout.above_key) + at * 2, keys[i])
                at = at + 1
    if num_equal > 0:  # noqa: SIM102
        # Of equal elements no more than k can be wanted: a row of ties costs no more than its scan.
        if ptx.ld_shared(counter(row, NUM_EQUAL)) < config.k:
            at = ptx.atom_add_shared(counter(row, NUM_EQUAL), num_equal)
            for i in range_constexpr(len(keys)):
                if keys[i] == threshold:
                    if at < config.k:
                        ptx.st_shared(row.smem + Uint32(layout.equal_index) + at * 4, Uint32(first + i))
                    at = at + 1


@cute.jit
def publish_candidates(row: Row, threshold: Uint32, shift: Uint32, num_above: Int32, num_equal: Uint32) -> None:
    """Adds this CTA's candidates to every CTA's histogram of bins of 2^shift keys, and says if they overflowed."""
    config, layout = row.config, row.layout
    if row.thread < config.cluster:
        overflow = Uint32(ptx.ld_shared(counter(row, NUM_ABOVE)) > config.candidate_capacity)
        overflow = overflow | Uint32(ptx.ld_shared(counter(row, NUM_HOT)) > HOT_CAPACITY)
        if const_expr(config.cluster > 1):
            # Words to come: one a candidate, the equal ones, the overflow. They may come before this.
            num_bytes = Uint32(4) * (Uint32(num_above) + 2)
            ptx.mbarrier_arrive_expect_tx_relaxed_cluster(
                ptx.mapa(barrier(row, CANDIDATES), Uint32(row.thread)), num_bytes
            )
        send_count(row, Uint32(layout.fine), row.thread, num_equal)
        send_count(row, Uint32(layout.counters + 4 * OVERFLOW), row.thread, overflow)
    unit = row.thread
    while unit < num_above * config.cluster:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit // config.cluster) * 2)
        send_count(row, Uint32(layout.fine) + ((key - threshold) >> shift) * 4, unit % config.cluster, Uint32(1))
        unit = unit + config.threads
    wait_for(row, CANDIDATES)


@cute.jit
def find_fine(row: Row, offset: int, num_bins: int, target: Uint32) -> tuple[Uint32, Uint32, Uint32]:
    """`find_from_top` over `num_bins` packed bins at `offset`; threads past the bins hold empty ones."""
    per_thread = max(1, num_bins // row.config.threads)
    values = cute.make_rmem_tensor((per_thread,), Uint32)
    first = num_bins - 1 - row.thread * per_thread
    for i in range_constexpr(per_thread):
        values[i] = Uint32(0)
        if first - i >= 0:
            values[i] = ptx.ld_shared(row.smem + Uint32(offset) + Uint32(first - i) * 4)
    return find_from_top(row, values, Uint32(first), target, True)


@cute.jit
def refine(
    row: Row, low: Uint32, bin_above: Uint32, shift: Uint32, num_above: Int32, equal_here: Uint32
) -> tuple[Uint32, Uint32, Uint32]:
    """Finds the k-th largest key inside a bin of 2^shift keys from `low` on; the same for all CTAs of the cluster.

    Args:
        row: the row.
        low: smallest key of the bin.
        bin_above: packed count above the bin.
        shift: 1 to 6.
        num_above: candidates above the threshold in this CTA.
        equal_here: this CTA's elements at the threshold, if the threshold is `low`, else 0.

    Returns:
        The key, the packed count above it, and its packed own.
    """
    config, layout = row.config, row.layout
    unit = row.thread
    while unit < num_above * config.cluster:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit // config.cluster) * 2)
        if ((key - low) >> shift) == 0:
            add_everywhere(row, Uint32(layout.finest) + (key - low) * 4, unit % config.cluster, Uint32(1))
        unit = unit + config.threads
    if row.thread < config.cluster:
        add_everywhere(row, Uint32(layout.finest), row.thread, equal_here)
    cluster_sync(row)
    target = row.num_select - (bin_above & Uint32(0xFFFF))
    found, above, count = find_fine(row, layout.finest, FINEST_BINS, target)
    return low + found, bin_above + above, count


@cute.jit
def emit(
    row: Row, threshold: Uint32, kth: Uint32, above: Uint32, count: Uint32, num_above: Int32, num_equal: Int32
) -> None:
    """Writes this CTA's selected indices: those above the k-th key from the front, those at it behind all of them."""
    layout = row.layout
    above_at = above >> Uint32(16)
    equal_at = (above & Uint32(0xFFFF)) + (count >> Uint32(16))
    num_equal_wanted = row.num_select
    if const_expr(row.config.mode == "blocks"):  # noqa: SIM102
        # A block of -inf alone is padding, not a choice.
        if kth == MIN_KEY:
            num_equal_wanted = Uint32(0)
    unit = row.thread
    while unit < num_above:
        key = ptx.ld_shared_u16(row.smem + Uint32(layout.above_key) + Uint32(unit) * 2)
        if key >= kth:
            index = ptx.ld_shared(row.smem + Uint32(layout.above_index) + Uint32(unit) * 4)
            if key > kth:
                put(row, above_at + ptx.atom_add_shared(counter(row, AT_ABOVE), Uint32(1)), index)
            else:
                at = equal_at + ptx.atom_add_shared(counter(row, AT_EQUAL), Uint32(1))
                if at < num_equal_wanted:
                    put(row, at, index)
        unit = unit + row.config.threads
    if kth == threshold:
        unit = row.thread
        while unit < num_equal:
            at = equal_at + Uint32(unit)
            if at < num_equal_wanted:
                put(row, at, ptx.ld_shared(row.smem + Uint32(layout.equal_index) + Uint32(unit) * 4))
            unit = unit + row.config.threads


def put(row: Row, at: Uint32, index: Uint32) -> None:
    """One selected index to its place in the output."""
    memory.st_weak_b32(row.out + Int64(at) * 4, index)
