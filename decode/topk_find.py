# SPDX-License-Identifier: Apache-2.0
"""Finding the bin of the n-th largest element in a histogram, by all threads of a CTA. Inlined into the kernels."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import GROUP_BINS, SUB_BINS, WARP
from decode.topk_keys import Row
from nvcomm.ptx import cluster as ptx


def warp_inclusive_sum(value: Uint32) -> Uint32:
    """The sum over this lane and those below it."""
    for distance in (1, 2, 4, 8, 16):
        value = ptx.shfl_up_add(value, distance)
    return value


def counted(word: Uint32, *, packed: bool) -> Uint32:
    """The count that decides: all of a word, or its low half."""
    return word & Uint32(0xFFFF) if packed else word


@cute.jit
def find_from_top(
    row: Row, values: cute.Tensor, first_bin: Uint32, target: Uint32, packed: const_expr
) -> tuple[Uint32, Uint32, Uint32]:
    """Finds the bin where the running count from the top reaches `target`.

    Thread t holds `values`, the counts of bins `first_bin`, `first_bin - 1`, ..., all of them below thread t - 1's.
    With `packed`, two counts of 16 bits are summed at once, and the low one decides. The total is at least `target`.

    Returns:
        The bin, the count in the bins above it, and its own.
    """
    config, layout = row.config, row.layout
    total = values[0]
    for i in range_constexpr(1, cute.size(values)):
        total = total + values[i]
    inclusive = warp_inclusive_sum(total)
    if row.lane == WARP - 1:
        ptx.st_shared(row.smem + Uint32(layout.warp_totals) + Uint32(row.warp) * 4, inclusive)
    cute.arch.sync_threads()
    warp_total = Uint32(0)
    if row.lane < config.warps:
        warp_total = ptx.ld_shared(row.smem + Uint32(layout.warp_totals) + Uint32(row.lane) * 4)
    warps_before = ptx.shfl_idx(warp_inclusive_sum(warp_total) - warp_total, Uint32(row.warp))
    above = warps_before + inclusive - total
    reached = counted(above + total, packed=packed) >= target
    if (counted(above, packed=packed) < target) & reached:
        for i in range_constexpr(cute.size(values)):
            upto = above + values[i]
            if (counted(above, packed=packed) < target) & (counted(upto, packed=packed) >= target):
                ptx.st_shared_v4(row.smem + Uint32(layout.found), (first_bin - Uint32(i), above, values[i], Uint32(0)))
            above = upto
    cute.arch.sync_threads()
    found, count_above, count, _ = ptx.ld_shared_v4(row.smem + Uint32(layout.found))
    return found, count_above, count


@cute.jit
def find_in_groups(row: Row, values: cute.Tensor, target: Uint32) -> tuple[Uint32, Uint32, Uint32]:
    """`find_from_top` over GROUP_BINS bins, of which thread t holds the t-th piece from the top."""
    per_thread = GROUP_BINS // row.config.threads
    return find_from_top(row, values, Uint32(GROUP_BINS - 1) - Uint32(row.thread * per_thread), target, False)


@cute.jit
def find_in_sub_bins(counts: cute.Tensor, above: Uint32, target: Uint32) -> tuple[Uint32, Uint32]:
    """The sub-bin where the running count from the top, starting at `above`, reaches `target`; by one thread alone.

    Returns:
        The sub-bin, and the count above it.
    """
    found = Uint32(0)
    count_above = above
    running = above
    for i in range_constexpr(SUB_BINS - 1, -1, -1):
        upto = running + counts[i]
        if (running < target) & (upto >= target):
            found = Uint32(i)
            count_above = running
        running = upto
    return found, count_above


@cute.jit
def group_threshold(row: Row, keys: cute.Tensor) -> Uint32:
    """The `quota`-th largest of this CTA's group maxima, exactly: every thread gets it.

    Args:
        row: the row.
        keys: this thread's group maxima; the histogram of groups and the sub-bins are 0 and visible.
    """
    layout = row.layout
    num_keys = cute.size(keys)
    for i in range_constexpr(num_keys):
        ptx.red_add_shared(row.smem + Uint32(layout.groups) + (keys[i] >> Uint32(4)) * 4, Uint32(1))
    cute.arch.sync_threads()
    per_thread = GROUP_BINS // row.config.threads
    values = cute.make_rmem_tensor((per_thread,), Uint32)
    at = row.smem + Uint32(layout.groups) + (Uint32(GROUP_BINS) - Uint32((row.thread + 1) * per_thread)) * 4
    for quad in range_constexpr(per_thread // 4):
        words = ptx.ld_shared_v4(at + Uint32(16 * quad))
        for i in range_constexpr(4):
            values[per_thread - 1 - (4 * quad + i)] = words[i]
    target = Uint32(row.config.quota)
    upper, above, _ = find_in_groups(row, values, target)
    for i in range_constexpr(num_keys):
        if (keys[i] >> Uint32(4)) == upper:
            ptx.red_add_shared(row.smem + Uint32(layout.sub) + (keys[i] & Uint32(15)) * 4, Uint32(1))
    cute.arch.sync_threads()
    counts = cute.make_rmem_tensor((SUB_BINS,), Uint32)
    for quad in range_constexpr(SUB_BINS // 4):
        words = ptx.ld_shared_v4(row.smem + Uint32(layout.sub + 16 * quad))
        for i in range_constexpr(4):
            counts[4 * quad + i] = words[i]
    lower, _ = find_in_sub_bins(counts, above, target)
    return upper * 16 + lower


def thread_index() -> Int32:
    """The thread of the CTA, of a one-dimensional block."""
    thread, _, _ = cute.arch.thread_idx()
    return thread
