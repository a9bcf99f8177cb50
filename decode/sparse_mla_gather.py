# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: from a column list to rows of K in shared memory.

A warp copies what it will use for the scores: 32 columns, half of each row. So it waits for its own copies only.
Rows of masked columns are zeroed and never read, so nothing that is in them can spread (0 x NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from decode.sparse_mla_layout import GRANULE, SparseMlaConfig
from decode.sparse_mla_work import Work
from nvcomm.ptx import mma


@dataclass(frozen=True)
class Columns:
    """The column set that this CTA reads from; run-time values.

    Attributes:
        indices: address of this token's list.
        length: address of this token's length, or 0.
        width: entries of the list.
        first: position of the list's first entry in what the length counts.
        base: address of the pool.
        page_stride: bytes from page to page.
        shift: log2 of the records to a page.
        num_slots: slots of the pool.
    """

    indices: Int64
    length: Int64
    width: Int32
    first: Int32
    base: Int64
    page_stride: Int64
    shift: Int32
    num_slots: Int32


@cute.jit
def select_columns(work: Work, position: Int32, token: Int32) -> tuple:
    """The column set of a position in the two lists put one after the other, and its place in that set's list.

    The second set begins at `work.window_columns`. CTAs of 128 columns: a multiple of 128, so each has one set.
    """
    from_window = position < work.window_columns
    chosen = [cutlass.select_(from_window, a, b) for a, b in zip(work.window, work.topk, strict=True)]
    indices, indices_stride, lengths, pool, page_stride, width, first, shift, num_slots = chosen
    length = cutlass.select_(lengths == 0, lengths, lengths + Int64(token) * 4)
    columns = Columns(
        indices + Int64(token) * indices_stride, length, width, first, pool, page_stride, shift, num_slots
    )
    return columns, position - cutlass.select_(from_window, Int32(0), work.window_columns)


def load_slot(columns: Columns, column: Int32, wanted: Boolean | bool = True) -> Int32:
    """The slot that `column` of the list names, or -1 if it is masked, past the width or the length, or no slot."""
    inside = (column < columns.width) & wanted
    slot = cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[columns.indices + Int64(column) * 4],
        predicate=inside,
    )
    length = cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[columns.length],
        predicate=columns.length != 0,
    )
    inside = inside & ((column + columns.first < length) | (columns.length == 0))
    active = inside & (Uint32(slot) < Uint32(columns.num_slots))
    return cutlass.select_(active, slot, Int32(-1))


def record_address(cfg: SparseMlaConfig, columns: Columns, slot: Int32) -> Int64:
    """Address of a slot's values; of slot 0 for -1, which is never read."""
    page = cutlass.max(slot, Int32(0)) >> columns.shift
    offset = cutlass.max(slot, Int32(0)) & ((Int32(1) << columns.shift) - 1)
    return columns.base + Int64(page) * columns.page_stride + Int64(offset) * cfg.layout.data_bytes


def gather_rows(
    cfg: SparseMlaConfig,
    address: Int64,
    active: Uint32,
    rows: Int32,
    half: Int32,
    first: Int32 | int,
    count: int,
    lane: Int32,
) -> None:
    """Starts the copies of half of `count` rows.

    Args:
        cfg: compile-time facts.
        address: lane i holds that of the record of row i.
        active: bit i: row i is copied; the others are zeroed.
        rows: address of row 0 in shared memory.
        half: of the dims. Of 576 bytes the halves are 256 each; `gather_tail` copies the rest.
        first: row to begin with.
        count: a multiple of 2.
        lane: of the warp.
    """
    lanes_per_row = cfg.layout.data_bytes // 512 * 16
    rows_per_copy = 32 // lanes_per_row
    granule = half * lanes_per_row + lane % lanes_per_row
    row = first + lane // lanes_per_row
    here = active >> Uint32(row)
    for step in range(0, count, rows_per_copy):
        source = cute.arch.shuffle_sync(address, row + step) + Int64(granule) * GRANULE
        target = rows + (row + step) * cfg.row_bytes + cfg.swizzle(granule, row + step) * GRANULE
        mma.cp_async_16_zfill(target, source, Int32((here >> Uint32(step)) & Uint32(1)) * 16)


def gather_scales(
    cfg: SparseMlaConfig, columns: Columns, slot: Int32, shared: Int32, group: Int32, half: Int32, lane: Int32
) -> None:
    """Starts the copy of the scales of this lane's row (of the group of 32) into this half's table."""
    page = cutlass.max(slot, Int32(0)) >> columns.shift
    offset = cutlass.max(slot, Int32(0)) & ((Int32(1) << columns.shift) - 1)
    block = Int32(1) << columns.shift
    source = columns.base + Int64(page) * columns.page_stride + Int64(block * cfg.layout.data_bytes + offset * 8)
    target = shared + cfg.scales_at + (half * cfg.columns + group * 32 + lane) * 8
    mma.cp_async_8_zfill(target, source, cutlass.select_(slot >= 0, Int32(8), Int32(0)))


def gather_tail(cfg: SparseMlaConfig, address: Int64, active: Uint32, rows: Int32, lane: Int32) -> None:
    """Starts the copies of the last 64 bytes of 32 rows of 576 bytes."""
    granule = 32 + lane % 4
    for i in range(4):
        row = i * 8 + lane // 4
        source = cute.arch.shuffle_sync(address, row) + Int64(granule) * GRANULE
        target = rows + row * cfg.row_bytes + cfg.swizzle(granule, row) * GRANULE
        mma.cp_async_16_zfill(target, source, Int32((active >> Uint32(row)) & Uint32(1)) * 16)


def is_active(slots: Int32) -> Uint32:
    """Bit i: lane i's column takes part."""
    return Uint32(cute.arch.vote_ballot_sync(Boolean(slots >= 0)))


def kept_columns(cfg: SparseMlaConfig, low: Uint32, high: Uint32, half: Int32) -> Uint32:
    """Which of the columns that this warp finishes take part: 8 bits a tile, in the order of `kept_tile`.

    Args:
        cfg: compile-time facts.
        low: of the group's first 32 columns.
        high: of the other 8, if there are any.
        half: of the dims.
    """
    keep = 8 * cfg.kept_tiles
    rest = (low >> Uint32(keep)) | (high << Uint32(32 - keep))
    return cutlass.select_(half == 0, low & Uint32((1 << keep) - 1), rest)
