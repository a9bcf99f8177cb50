# SPDX-License-Identifier: Apache-2.0
"""The bin of the n-th largest element in a histogram whose first bin is the largest. Inlined into the kernels."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from decode.topk_config import EXACT_BINS, FAR_SHIFT, FINE_BINS, GROUP_BINS, WARP
from decode.topk_keys import MIN_KEY, max_u32
from decode.topk_row import Row
from nvcomm.ptx import cluster as ptx

LOW = 0xFFFF
BINS_OF_LANE = 8
BINS_AT_ONCE = BINS_OF_LANE * WARP


def warp_inclusive_sum(value: Uint32) -> Uint32:
    """The sum over this lane and those below it."""
    for distance in (1, 2, 4, 8, 16):
        value = ptx.shfl_up_add(value, distance)
    return value


def popc(mask: Uint32) -> Uint32:
    """Number of set bits."""
    return Uint32(cute.arch.popc(mask))


@cute.jit
def find_bin(
    row: Row, load: const_expr, where: Uint32, num_bins: int, target: Uint32, packed: const_expr = True
) -> tuple[Uint32, Uint32, Uint32]:
    """The bin where the running count reaches `target`; by a warp on its own, 256 bins at once.

    Args:
        row: the row.
        load: `load_words` or `load_received`.
        where: its argument.
        num_bins: of the histogram, a multiple of 256.
        target: at least 1.
        packed: a bin is two counts of 16 bits, of which the low one decides.

    Returns:
        The bin, the count in the bins before it, and its own. `num_bins` where the total is less than `target`.
    """
    mask = Uint32(LOW if const_expr(packed) else 0xFFFFFFFF)
    counts = cute.make_rmem_tensor((BINS_OF_LANE,), Uint32)
    first = Uint32(row.lane) * BINS_OF_LANE
    before = Uint32(0)
    load(row, counts, where, first)
    own = sum_of(counts)
    upto = warp_inclusive_sum(own)
    total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    end = Uint32(BINS_AT_ONCE)
    while (((before + total) & mask) < target) & (end < num_bins):
        before = before + total
        first = first + BINS_AT_ONCE
        end = end + BINS_AT_ONCE
        load(row, counts, where, first)
        own = sum_of(counts)
        upto = warp_inclusive_sum(own)
        total = ptx.shfl_idx(upto, Uint32(WARP - 1))
    holder = popc(ptx.ballot(((before + upto) & mask) < target))
    # What follows is right in the lane that holds the bin.
    above = before + upto - own
    count = counts[0]
    for i in range_constexpr(1, BINS_OF_LANE):
        if ((above + count) & mask) < target:
            above = above + count
            count = counts[i]
            first = first + 1
    found = ptx.shfl_idx(first, holder)
    if holder == WARP:
        found = Uint32(num_bins)
    return found, ptx.shfl_idx(above, holder), ptx.shfl_idx(count, holder)


def sum_of(counts: cute.Tensor) -> Uint32:
    """The sum of a lane's bins."""
    total = counts[0]
    for i in range(1, BINS_OF_LANE):
        total = total + counts[i]
    return total


def load_words(row: Row, counts: cute.Tensor, offset: int, first: Uint32) -> None:
    """Reads eight bins from `first` on of the histogram at `offset`, a word each."""
    at = row.smem + Uint32(offset) + first * 4
    for i, word in enumerate([*ptx.ld_shared_v4(at), *ptx.ld_shared_v4(at + Uint32(16))]):
        counts[i] = word


@cute.jit
def load_received(row: Row, counts: cute.Tensor, num_stores: Uint32, first: Uint32) -> None:
    """Adds up eight bins from `first` on of what the row's CTAs have sent: packed, of all CTAs and of those before."""
    for i in range_constexpr(BINS_OF_LANE):
        counts[i] = Uint32(0)
    if first // BINS_OF_LANE < num_stores:
        of_all = [Uint32(0)] * 4
        of_earlier = [Uint32(0)] * 4
        for src in range_constexpr(row.config.cluster):
            words = ptx.ld_shared_v4(row.smem + Uint32(row.layout.received + 2 * FINE_BINS * src) + first * 2)
            is_earlier = Uint32(Int32(src) < row.cta)
            of_all = [total + word for total, word in zip(of_all, words, strict=True)]
            of_earlier = [total + word * is_earlier for total, word in zip(of_earlier, words, strict=True)]
        for i in range_constexpr(4):
            counts[2 * i] = (of_all[i] & Uint32(LOW)) | (of_earlier[i] << Uint32(16))
            counts[2 * i + 1] = (of_all[i] >> Uint32(16)) | (of_earlier[i] & Uint32(LOW << 16))


def note_largest(row: Row, keys: cute.Tensor, tail: Uint32) -> None:
    """Leaves this warp's largest key for `largest_of_cta`, which runs behind a barrier."""
    largest = tail
    for i in range(cute.size(keys)):
        largest = max_u32(largest, keys[i])
    ptx.st_shared(row.smem + Uint32(row.layout.warp_totals) + Uint32(row.warp) * 4, ptx.redux_max(largest))


@cute.jit
def largest_of_cta(row: Row) -> Uint32:
    """The largest key that the CTA has seen."""
    largest = Uint32(0)
    if row.lane < row.config.warps:
        largest = ptx.ld_shared(row.smem + Uint32(row.layout.warp_totals) + Uint32(row.lane) * 4)
    return ptx.redux_max(largest)


@cute.jit
def group_threshold(row: Row, keys: cute.Tensor, tail: Uint32) -> tuple[Uint32, Uint32]:
    """A key that at least `quota` of this CTA's groups reach, hardly more; and the CTA's largest key. In warp 0 alone.

    It is the quota-th largest group maximum where that lies within 16 octaves of the largest key, else up to 31 less.
    Groups of -inf or of nothing are not counted: with too few others the threshold is -inf.

    Args:
        row: the row.
        keys: this thread's group maxima; the histogram of groups is 0 and visible.
        tail: another key that counts for the largest.
    """
    note_largest(row, keys, tail)
    cute.arch.sync_threads()
    largest = largest_of_cta(row)
    for i in range_constexpr(cute.size(keys)):
        if keys[i] > MIN_KEY:
            ptx.red_add_shared(row.smem + Uint32(row.layout.groups) + group_bin(largest - keys[i]) * 4, Uint32(1))
    cute.arch.sync_threads()
    threshold = Uint32(MIN_KEY)
    if row.warp == 0:
        found, _, _ = find_bin(row, load_words, row.layout.groups, GROUP_BINS, Uint32(row.config.quota), False)
        # The smallest key of the bin.
        distance = found
        if found >= EXACT_BINS:
            distance = EXACT_BINS + ((found - EXACT_BINS + 1) << Uint32(FAR_SHIFT)) - 1
        if (found < GROUP_BINS) & (distance + MIN_KEY < largest):
            threshold = largest - distance
    return threshold, largest


@cute.jit
def group_bin(distance: Uint32) -> Uint32:
    """The bin of a key `distance` below the largest: exact near it, 32 keys a bin far away."""
    found = distance
    if distance >= EXACT_BINS:
        found = EXACT_BINS + ((distance - EXACT_BINS) >> Uint32(FAR_SHIFT))
    return found
