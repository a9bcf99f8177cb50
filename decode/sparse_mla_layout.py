# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: what is fixed at compile time, and where things lie in shared memory.

A CTA has 8 warps. Warp w = 2 * group + half takes columns 32 * group .. + 31 and half of the 512 dims for the scores,
then dims 64 * w .. + 63 of all 128 columns for the values.

    K        128 rows of `row_bytes`, 16-byte granules permuted within a row so that ldmatrix meets no bank twice
    scales   (scaled FP8) 2 x 128 x 8 bytes: a copy for each half, so that a warp waits for its own copies only
    scratch  8 KiB: partial scores between the warps of a pair, later P in fragment order
    tables   2 x 16 heads x 8 warps floats: maxima, sums
    inbox    partial outputs that the other CTAs of the cluster push here
    stats    (m, l) of every CTA for 16 heads
"""

from __future__ import annotations

from dataclasses import dataclass

from decode.kv_cache import SCALED_FP8, RecordLayout

COLUMNS = 128  # of a CTA
MAX_CHUNKS = 5
WARPS = 8
THREADS = 32 * WARPS
GRANULE = 16  # bytes of an asynchronous copy, and of a row of an 8x8 matrix of 16-bit values
HEADS = 16  # rows of a matrix instruction
UNITS = 64  # of 8 heads x 16 dims, the pieces in which partial outputs travel: 8 a warp
UNIT_BYTES = 8 * 16 * 4


@dataclass(frozen=True, slots=True)
class SparseMlaConfig:
    """What a kernel is compiled for.

    Attributes:
        layout: of the KV records.
        chunks: CTAs to a token, the cluster's size.
        fp8_query: E4M3 query instead of BF16.
        few_heads: 8 heads in all, so half of each matrix instruction's rows are empty.
        sink: whether there is a sink.
        pdl: launched for programmatic dependent launch.
    """

    layout: RecordLayout
    chunks: int
    fp8_query: bool = False
    few_heads: bool = False
    sink: bool = False
    pdl: bool = True

    @property
    def row_granules(self) -> int:
        """16-byte granules of a row of K."""
        return self.layout.data_bytes // GRANULE

    @property
    def unit_slots(self) -> int:
        """Units that a CTA finishes: unit u belongs to CTA u % chunks, as its piece u // chunks."""
        return -(-UNITS // self.chunks)

    @property
    def scales_at(self) -> int:
        """Offsets in shared memory, in bytes."""
        return COLUMNS * self.layout.data_bytes

    @property
    def scratch_at(self) -> int:
        """Behind the scales."""
        return self.scales_at + 2 * COLUMNS * self.layout.scale_bytes

    @property
    def maxima_at(self) -> int:
        """Behind the scratch."""
        return self.scratch_at + WARPS * 1024

    @property
    def sums_at(self) -> int:
        """Behind the maxima."""
        return self.maxima_at + HEADS * WARPS * 4

    @property
    def stats_at(self) -> int:
        """Behind the sums."""
        return self.sums_at + HEADS * WARPS * 4

    @property
    def inbox_at(self) -> int:
        """Behind the stats."""
        return self.stats_at + MAX_CHUNKS * HEADS * 8

    @property
    def shared_bytes(self) -> int:
        """In all. At most 113 KiB lets two CTAs share an SM of 228 KiB."""
        return self.inbox_at + (self.chunks - 1) * self.unit_slots * UNIT_BYTES

    @property
    def ctas_per_sm(self) -> int:
        """What the registers are limited for."""
        return 2 if self.shared_bytes <= 113 * 1024 else 1

    def swizzle(self, granule: int, row: int) -> int:
        """Where a granule of a row lies within the row; works on run-time values too.

        Eight consecutive rows put the same granule into eight different 16-byte columns of the 128-byte bank line.
        """
        if self.row_granules % 8 == 0:
            return granule ^ (row & 7)
        # 36 granules: rows begin 64 bytes apart in turn, so the row's lowest bit does its part already.
        return granule ^ ((row >> 1) & 3)

    @property
    def scaled(self) -> bool:
        """Whether the records have scales and a BF16 part."""
        return self.layout == SCALED_FP8
