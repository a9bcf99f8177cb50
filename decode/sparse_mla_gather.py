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

from decode.sparse_mla_layout import COLUMNS, GRANULE, SparseMlaConfig
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


def load_slot(columns: Columns, column: Int32) -> Int32:
    """The slot that `column` of the list names, or -1 if it is masked, past the width or the length, or no slot."""
    slot = cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[columns.indices + Int64(column) * 4],
        predicate=column < columns.width,
    )
    bounded = columns.length != 0
    length = cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[columns.length], predicate=bounded
    )
    inside = column < columns.width
    inside = inside & ((column + columns.first < length) | (columns.length == 0))
    active = inside & (Uint32(slot) < Uint32(columns.num_slots))
    return cutlass.select_(active, slot, Int32(-1))


def gather_rows(
    cfg: SparseMlaConfig, address: Int64, active: Uint32, rows: Int32, half: Int32, first: Int32, lane: Int32
) -> None:
    """Starts the copies of half of rows `first` .. `first` + 15 of a group of 32.

    Args:
        cfg: compile-time facts.
        address: lane i holds that of the record of row i of the group.
        active: bit i: row i is copied; the others are zeroed.
        rows: address of the group's rows in shared memory.
        half: of the dims. Of 576 bytes the halves are 256 each; `gather_tail` copies the rest.
        first: 0 or 16.
        lane: of the warp.
    """
    lanes_per_row = cfg.layout.data_bytes // 512 * 16
    rows_per_copy = 32 // lanes_per_row
    granule = half * lanes_per_row + lane % lanes_per_row
    row = first + lane // lanes_per_row
    here = active >> Uint32(row)
    for i in range(16 // rows_per_copy):
        step = i * rows_per_copy
        source = cute.arch.shuffle_sync(address, row + step) + Int64(granule) * GRANULE
        target = rows + (row + step) * cfg.row_bytes + cfg.swizzle(granule, row + step) * GRANULE
        num_bytes = Int32((here >> Uint32(step)) & Uint32(1)) * 16
        mma.cp_async_16_zfill(target, source, num_bytes)


def record_address(cfg: SparseMlaConfig, columns: Columns, slot: Int32) -> Int64:
    """Address of a slot's values; of slot 0 for -1, which is never read."""
    page = cutlass.max(slot, Int32(0)) >> columns.shift
    offset = cutlass.max(slot, Int32(0)) & ((Int32(1) << columns.shift) - 1)
    return columns.base + Int64(page) * columns.page_stride + Int64(offset) * cfg.layout.data_bytes


def copy_bytes(slot: Int32, num_bytes: int) -> Int32:
    """What to copy of a slot: nothing for -1."""
    return cutlass.select_(slot >= 0, Int32(num_bytes), Int32(0))


def gather_scales(
    cfg: SparseMlaConfig, columns: Columns, slot: Int32, shared: Int32, group: Int32, half: Int32, lane: Int32
) -> None:
    """Starts the copy of the scales of this lane's row (of the group of 32) into this half's table."""
    page = cutlass.max(slot, Int32(0)) >> columns.shift
    offset = cutlass.max(slot, Int32(0)) & ((Int32(1) << columns.shift) - 1)
    block = Int32(1) << columns.shift
    source = columns.base + Int64(page) * columns.page_stride + Int64(block * cfg.layout.data_bytes + offset * 8)
    target = shared + cfg.scales_at + (half * COLUMNS + group * 32 + lane) * 8
    mma.cp_async_8_zfill(target, source, copy_bytes(slot, 8))


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
