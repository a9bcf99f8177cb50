# SPDX-License-Identifier: Apache-2.0
"""Selection without candidate lists, so without a capacity: for data that overflows them, and in index order. Inlined.

`count_all` finds the k-th key by two histograms over the whole row, read again. `emit_in_order` walks the row again,
each warp a stretch of consecutive vectors, and writes the selected indices in ascending order, ties to the smaller.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import ORDER_BINS, SUB_BINS, WARP
from decode.topk_emit import put
from decode.topk_exchange import cluster_sync
from decode.topk_find import find_bin, load_words, popc, warp_inclusive_sum
from decode.topk_keys import MAX_KEY, MIN_KEY
from decode.topk_row import Row, keys_of_vector
from nvcomm.ptx import cluster as ptx


@cute.jit
def add_row(row: Row, offset: int, upper: Uint32, sub: const_expr) -> None:
    """Adds this CTA's share of the row to its own histogram: of upper 12 bits, or of lower 4 bits where they match.

    Bins begin with the largest keys. Runs of equal bins within a vector are added at once: rows that come here are full
    of them.
    """
    config = row.config
    keys = cute.make_rmem_tensor((row.elements,), Uint32)
    vector = row.cta * config.threads + row.thread
    while vector < row.num_vectors + Int32(row.num_tail > 0):
        keys_of_vector(row, keys, vector)
        run_bin = Uint32(0)
        run = Uint32(0)
        for e in range_constexpr(row.elements):
            distance = Uint32(MAX_KEY) - keys[e]
            here = distance & Uint32(SUB_BINS - 1) if const_expr(sub) else distance // SUB_BINS
            counts = keys[e] != 0
            if const_expr(sub):
                counts = counts & (distance // SUB_BINS == upper)
            if counts:
                if (here != run_bin) & (run > 0):
                    ptx.red_add_shared(row.smem + Uint32(offset) + run_bin * 4, run)
                    run = Uint32(0)
                run_bin = here
                run = run + 1
        if run > 0:
            ptx.red_add_shared(row.smem + Uint32(offset) + run_bin * 4, run)
        vector = vector + config.step_vectors


@cute.jit
def count_all(row: Row) -> tuple[Uint32, Uint32]:
    """The `num_select`-th largest key of the row, and how many are above it; all CTAs of the cluster take part."""
    config, layout = row.config, row.layout
    zero = Uint32(0)
    quads = ORDER_BINS // (4 * config.threads)
    for i in range_constexpr(quads):
        ptx.st_shared_v4(
            row.smem + Uint32(layout.groups + 16 * i * config.threads) + Uint32(row.thread) * 16, (zero,) * 4
        )
    if row.thread < SUB_BINS:
        ptx.st_shared(row.smem + Uint32(layout.sub) + Uint32(row.thread) * 4, zero)
    cute.arch.sync_threads()
    add_row(row, layout.groups, zero, False)
    cluster_sync(row)
    # The sums over the CTAs take the place of the candidates.
    for i in range_constexpr(quads):
        at = Uint32(16 * i * config.threads) + Uint32(row.thread) * 16
        sums = [zero] * 4
        for cta in range_constexpr(config.cluster):
            words = ptx.ld_shared_cluster_v4(ptx.mapa(row.smem + Uint32(layout.groups) + at, Uint32(cta)))
            sums = [total + word for total, word in zip(sums, words, strict=True)]
        ptx.st_shared_v4(row.smem + Uint32(layout.above_index) + at, tuple(sums))
    cute.arch.sync_threads()
    upper, above, _ = find_bin(row, load_words, layout.above_index, ORDER_BINS, row.num_select, False)
    add_row(row, layout.sub, upper, True)
    cluster_sync(row)
    count = zero
    if row.lane < SUB_BINS:
        at = row.smem + Uint32(layout.sub) + Uint32(row.lane) * 4
        for cta in range_constexpr(config.cluster):
            count = count + ptx.ld_shared_cluster(ptx.mapa(at, Uint32(cta)))
    # The lanes that have not reached the target come first; the next one has.
    upto = above + warp_inclusive_sum(count)
    lower = popc(ptx.ballot(upto < row.num_select))
    # `emit_in_order` has a barrier of the cluster: nobody exits while these bins are still being read.
    return MAX_KEY - (upper * SUB_BINS + lower), ptx.shfl_idx(upto - count, lower)


@cute.jit
def emit_in_order(row: Row, kth: Uint32, count_above: Uint32) -> None:
    """Writes the indices above `kth`, and of those at it the smallest that are needed, in ascending order."""
    config = row.config
    wanted = row.num_select - count_above
    if const_expr(config.mode == "blocks"):  # noqa: SIM102
        # A block of -inf alone is padding, not a choice.
        if kth == MIN_KEY:
            wanted = Uint32(0)
    num_vectors = row.num_vectors + Int32(row.num_tail > 0)
    num_steps = (num_vectors + config.step_vectors - 1) // config.step_vectors
    begin = (row.cta * config.warps + row.warp) * num_steps * WARP
    keys = cute.make_rmem_tensor((row.elements,), Uint32)

    above = Uint32(0)
    equal = Uint32(0)
    for step in cutlass.range(num_steps, unroll=1):
        keys_of_vector(row, keys, begin + step * WARP + row.lane)
        for e in range_constexpr(row.elements):
            above = above + Uint32(keys[e] > kth)
            equal = equal + Uint32(keys[e] == kth)
    above = ptx.redux_add(above)
    equal = ptx.redux_add(equal)
    above_at, equal_at = positions_before(row, above, equal)

    for step in cutlass.range(num_steps, unroll=1):
        vector = begin + step * WARP + row.lane
        keys_of_vector(row, keys, vector)
        num_above = Uint32(0)
        num_equal = Uint32(0)
        for e in range_constexpr(row.elements):
            num_above = num_above + Uint32(keys[e] > kth)
            num_equal = num_equal + Uint32(keys[e] == kth)
        # A warp has at most 256 of either: both sums fit one word.
        packed = num_above | (num_equal << Uint32(16))
        inclusive = warp_inclusive_sum(packed)
        my_above = above_at + ((inclusive - packed) & Uint32(0xFFFF))
        my_equal = equal_at + ((inclusive - packed) >> Uint32(16))
        if packed != 0:
            for e in range_constexpr(row.elements):
                equals_taken = my_equal
                if equals_taken > wanted:
                    equals_taken = wanted
                if (keys[e] > kth) | ((keys[e] == kth) & (my_equal < wanted)):
                    put(row, my_above + equals_taken, Uint32(vector * row.elements + e))
                my_above = my_above + Uint32(keys[e] > kth)
                my_equal = my_equal + Uint32(keys[e] == kth)
        warp_total = ptx.shfl_idx(inclusive, Uint32(WARP - 1))
        above_at = above_at + (warp_total & Uint32(0xFFFF))
        equal_at = equal_at + (warp_total >> Uint32(16))


@cute.jit
def positions_before(row: Row, above: Uint32, equal: Uint32) -> tuple[Uint32, Uint32]:
    """How many elements above and at the k-th key lie in the warps before this one, over the whole cluster."""
    config, layout = row.config, row.layout
    cute.arch.sync_threads()
    totals = row.smem + Uint32(layout.warp_totals)
    slots = row.smem + Uint32(layout.slots)
    if row.lane == 0:
        ptx.st_shared(totals + Uint32(row.warp) * 4, above)
        ptx.st_shared(totals + Uint32(WARP + row.warp) * 4, equal)
    cute.arch.sync_threads()
    warp_above = Uint32(0)
    warp_equal = Uint32(0)
    if row.lane < config.warps:
        warp_above = ptx.ld_shared(totals + Uint32(row.lane) * 4)
        warp_equal = ptx.ld_shared(totals + Uint32(WARP + row.lane) * 4)
    all_above = ptx.redux_add(warp_above)
    all_equal = ptx.redux_add(warp_equal)
    earlier = Uint32(row.lane < row.warp)
    above_before = ptx.redux_add(warp_above * earlier)
    equal_before = ptx.redux_add(warp_equal * earlier)
    # The first slots hold the bracket, which every thread of every CTA had read before counts were sent. The second may
    # still be looked at.
    if row.thread < config.cluster:
        ptx.st_shared_cluster(ptx.mapa(slots + Uint32(row.cta) * 4, Uint32(row.thread)), all_above)
        ptx.st_shared_cluster(ptx.mapa(slots + Uint32(32 + row.cta) * 4, Uint32(row.thread)), all_equal)
    cluster_sync(row)
    cta_above = Uint32(0)
    cta_equal = Uint32(0)
    if row.lane < row.cta:
        cta_above = ptx.ld_shared(slots + Uint32(row.lane) * 4)
        cta_equal = ptx.ld_shared(slots + Uint32(32 + row.lane) * 4)
    return above_before + ptx.redux_add(cta_above), equal_before + ptx.redux_add(cta_equal)
