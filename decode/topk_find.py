# SPDX-License-Identifier: Apache-2.0
"""Finding the bin of the n-th largest element in a histogram, by all threads of a CTA. Inlined into the kernels."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32, const_expr, range_constexpr

from decode.topk_config import GROUP_BINS, SUB_BINS
from decode.topk_keys import Row
from nvcomm.ptx import cluster as ptx

SUB_BARRIER = 1  # named barrier of the CTA; 0 is sync_threads


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
    layout = row.layout
    total = values[0]
    for i in range_constexpr(1, cute.size(values)):
        total = total + values[i]
    warp_total = ptx.redux_add(total)
    if row.lane == 0:
        ptx.st_shared(row.smem + Uint32(layout.warp_totals) + Uint32(row.warp) * 4, warp_total)
    cute.arch.sync_threads()
    earlier = Uint32(0)
    if row.lane < row.warp:
        earlier = ptx.ld_shared(row.smem + Uint32(layout.warp_totals) + Uint32(row.lane) * 4)
    before = ptx.redux_add(earlier)
    # One warp holds the bin; the others wait for it at the barrier.
    if (counted(before, packed=packed) < target) & (counted(before + warp_total, packed=packed) >= target):
        above = before + warp_inclusive_sum(total) - total
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


def find_in_sub_bins(row: Row, count: Uint32, above: Uint32, target: Uint32) -> tuple[Uint32, Uint32]:
    """The sub-bin where the running count from the top, starting at `above`, reaches `target`; by a warp.

    Lane i holds the count of sub-bin SUB_BINS - 1 - i, lanes from SUB_BINS on hold 0.

    Returns:
        The sub-bin, and the count above it.
    """
    upto = above + warp_inclusive_sum(count)
    # The lanes that have not reached the target come first; the next one has.
    short = popc(ptx.ballot(upto < target))
    return Uint32(SUB_BINS - 1) - short, ptx.shfl_idx(upto - count, short)


def popc(mask: Uint32) -> Uint32:
    """Number of set bits."""
    return Uint32(cute.arch.popc(mask))


@cute.jit
def group_threshold(row: Row, keys: cute.Tensor) -> Uint32:
    """The `quota`-th largest of this CTA's group maxima, exactly; warp 0 gets it, the others get 0 and go on.

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
    result = Uint32(0)
    if row.warp == 0:
        cute.arch.barrier(barrier_id=SUB_BARRIER, number_of_threads=row.config.threads)
        count = Uint32(0)
        if row.lane < SUB_BINS:
            count = ptx.ld_shared(row.smem + Uint32(layout.sub) + Uint32(SUB_BINS - 1 - row.lane) * 4)
        lower, _ = find_in_sub_bins(row, count, above, target)
        result = upper * 16 + lower
    else:
        cute.arch.barrier_arrive(barrier_id=SUB_BARRIER, number_of_threads=row.config.threads)
    return result
