# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: from a column list to rows of K in shared memory, and the query into registers.

A warp copies what it will use for the scores: 32 columns, half of each row. So it waits for its own copies only.
Rows of masked columns are zeroed and never read, so nothing that is in them can spread (0 x NaN is NaN).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from decode.sparse_mla_layout import COLUMNS, GRANULE, SparseMlaConfig
from nvcomm.ptx import memory, mma

QUERY_STEPS = 16  # k-steps of 16 dims in half a row
HEAD_STRIDE = 512


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
    cfg: SparseMlaConfig,
    columns: Columns,
    slots: Int32,
    shared: Int32,
    group: Int32,
    half: Int32,
    first: Int32,
    lane: Int32,
) -> None:
    """Starts the copies of half of rows `first` .. `first` + 15 of a group of 32, one group of copies.

    Args:
        cfg: compile-time facts.
        columns: where from.
        slots: lane i holds the slot of row i of the group.
        shared: address of this CTA's shared memory.
        group: of columns.
        half: of the dims.
        first: 0 or 16.
        lane: of the warp.
    """
    row_bytes = cfg.layout.data_bytes
    lanes_per_row = min(32, row_bytes // 2 // GRANULE)
    rows_per_copy = 32 // lanes_per_row
    granule = half * lanes_per_row + lane % lanes_per_row
    for i in range(16 // rows_per_copy):
        row = first + i * rows_per_copy + lane // lanes_per_row
        slot = cute.arch.shuffle_sync(slots, row)
        source = record_address(cfg, columns, slot) + Int64(granule) * GRANULE
        row_in_chunk = group * 32 + row
        target = shared + row_in_chunk * row_bytes + cfg.swizzle(granule, row) * GRANULE
        mma.cp_async_16_zfill(target, source, copy_bytes(slot, 16))
    mma.cp_async_commit_group()


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


def gather_tail(cfg: SparseMlaConfig, columns: Columns, slots: Int32, shared: Int32, group: Int32, lane: Int32) -> None:
    """Starts the copies of the last 64 bytes of 32 rows of 576 bytes, which the two halves of 256 bytes leave."""
    granule = 32 + lane % 4
    for i in range(4):
        row = i * 8 + lane // 4
        slot = cute.arch.shuffle_sync(slots, row)
        source = record_address(cfg, columns, slot) + Int64(granule) * GRANULE
        target = shared + (group * 32 + row) * cfg.layout.data_bytes + cfg.swizzle(granule, row) * GRANULE
        mma.cp_async_16_zfill(target, source, copy_bytes(slot, 16))


def load_query_fp8(query: Int64, half: Int32, lane: Int32, few_heads: bool) -> list[list[Uint32]]:
    """A fragments of an E4M3 query in FP8 order, still E4M3: for each k-step, 4 dims of head lane/4 and of head + 8."""
    addr = query + Int64((lane // 4) * HEAD_STRIDE + half * 256 + (lane % 4) * 4)
    rows = 1 if few_heads else 2
    return [
        [memory.ld_weak_b32(addr + (step * 16 + row * 8 * HEAD_STRIDE)) for row in range(rows)]
        for step in range(QUERY_STEPS)
    ]


def unpack_query_fp8(words: list[list[Uint32]]) -> list[list[Uint32]]:
    """F16 fragments of what `load_query_fp8` loaded, exact."""
    fragments = []
    for step in words:
        rows = [mma.cvt_e4m3x4_f16x2(word) for word in step]
        fragments.append(_in_fragment_order(rows))
    return fragments


def load_query_bf16(query: Int64, half: Int32, lane: Int32, few_heads: bool, order: str) -> list[list[Uint32]]:
    """A fragments of a BF16 query for half of the dims, still BF16.

    Args:
        query: address of the first head of this token.
        half: of the dims.
        lane: of the warp.
        few_heads: heads 8 to 15 do not exist: their rows are 0.
        order: how the k index of a step maps to its 16 dims: "fp8", 4 consecutive dims a lane, as FP8 rows come out of
            ldmatrix; "bf16", as the instruction has it; "scaled", the first 12 steps as in "fp8", and the last 4 so too
            in half 0 (E4M3 part), as in "bf16" in half 1 (BF16 part).
    """
    rows = 1 if few_heads else 2
    addr = query + Int64((lane // 4) * HEAD_STRIDE + half * 256) * 2
    packed = Int64((lane % 4) * 4) * 2
    near = Int64((lane % 4) * 2) * 2
    far = near + 16
    if order == "scaled":
        near = cutlass.select_(half == 0, packed, near)
        far = cutlass.select_(half == 0, packed + 4, far)
    fragments = []
    for step in range(QUERY_STEPS):
        words = []
        for row in range(rows):
            at = addr + (step * 16 + row * 8 * HEAD_STRIDE) * 2
            if order == "fp8" or (order == "scaled" and step < 12):
                words.append(memory.ld_weak_v2(at + packed))
            else:
                words.append((memory.ld_weak_b32(at + near), memory.ld_weak_b32(at + far)))
        fragments.append(_in_fragment_order(words))
    return fragments


def query_to_f16(fragments: list[list[Uint32]], few_heads: bool) -> tuple[list[list[Uint32]], tuple[Float32, Float32]]:
    """BF16 fragments as F16, scaled by a power of two for each head so that they fit; and what undoes the scaling.

    The largest value of a head lands in [2^14, 2^15), so whatever is lost lies 2^-38 below it.
    """
    scales, undo = [], []
    for row in range(1 if few_heads else 2):
        sizes = [word & Uint32(0x7FFF7FFF) for words in fragments for word in (words[row], words[row + 2])]
        largest = functools.reduce(mma.max_u16x2, sizes)
        largest = mma.max_u16x2(largest, largest >> Uint32(16)) & Uint32(0xFFFF)
        for offset in (1, 2):
            other = cute.arch.shuffle_sync_bfly(largest, offset=offset)
            largest = cutlass.select_(other > largest, other, largest)
        # Exponent fields: e of the largest value, 268 - e of the scale; clamped so that both powers are normal.
        exponent = Int32(268) - Int32(largest >> Uint32(7))
        exponent = cutlass.max(Int32(1), cutlass.min(Int32(253), exponent))
        scales.append(mma.bits_f32(Uint32(exponent) << Uint32(23)))
        undo.append(mma.bits_f32(Uint32(Int32(254) - exponent) << Uint32(23)))
    if few_heads:
        scales, undo = scales * 2, undo * 2
    converted = []
    for words in fragments:
        step = []
        for i, word in enumerate(words):
            low, high = mma.cvt_bf16x2_f32(word)
            scale = scales[i % 2]
            step.append(word if few_heads and i % 2 else mma.cvt_rn_f16x2(low * scale, high * scale))
        converted.append(step)
    return converted, (undo[0], undo[1])


def _in_fragment_order(rows: list[tuple[Uint32, Uint32]]) -> list[Uint32]:
    """(k 0..7, k 8..15) of head lane/4, and of head + 8 or nothing, as registers a0 to a3."""
    low = rows[0]
    high = rows[1] if len(rows) == 2 else (Uint32(0), Uint32(0))
    return [low[0], high[0], low[1], high[1]]


def is_active(slots: Int32) -> Uint32:
    """Bit i: lane i's column takes part."""
    return Uint32(cute.arch.vote_ballot_sync(Boolean(slots >= 0)))
