# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: what is fixed at compile time, and where things lie in shared memory.

A CTA has 8 warps. Warp w = 2 * group + half takes columns 32 * group .. + 31 and half of the 512 dims for the scores,
then dims 64 * w .. + 63 of all 128 columns for the values.
"""

from __future__ import annotations

import functools
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
EXCHANGE_BYTES = WARPS * 1024
WEIGHTS_BYTES = COLUMNS * HEADS * 2
QUERY_ROW_BYTES = 1024 + GRANULE  # so that ldmatrix finds 8 rows in 8 different 16-byte columns
# What a CTA may have for two of them to share an SM of 228 KiB; 1 KiB of each goes to the driver.
SHARED_BYTES_OF_TWO = 113 * 1024


@dataclass(frozen=True)
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
    def scaled(self) -> bool:
        """Whether the records have scales and a BF16 part."""
        return self.layout == SCALED_FP8

    @property
    def unit_slots(self) -> int:
        """Units that a CTA finishes: unit u belongs to CTA u % chunks, as its piece u // chunks."""
        return -(-UNITS // self.chunks)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where each area begins, in bytes, and under "end" how many there are.

        rows: 128 rows of K, the granules of a row permuted (`swizzle`). scales: for scaled records 2 x 128 x 8 bytes, a
        copy for each half of the dims, so that a warp waits for its own copies only. scratch: partial scores between
        the warps of a pair; later the probabilities in fragment order, and behind them this CTA's own partial outputs.
        maxima and sums: 16 heads x 8 warps. undo: what undoes the scaling of each head's query. sinks: of 16 heads.
        stats: (m, l) of every CTA for 16 heads. inbox: partial outputs from the other CTAs; before that, the query.
        """
        own = self.unit_slots * UNIT_BYTES if self.chunks > 1 else 0
        inbox = (self.chunks - 1) * self.unit_slots * UNIT_BYTES
        sizes = {
            "rows": COLUMNS * self.layout.data_bytes,
            "scales": 2 * COLUMNS * self.layout.scale_bytes,
            "scratch": max(EXCHANGE_BYTES, WEIGHTS_BYTES + own),
            "maxima": HEADS * WARPS * 4,
            "sums": HEADS * WARPS * 4,
            "undo": HEADS * 4,
            "sinks": HEADS * 4,
            "stats": MAX_CHUNKS * HEADS * 8,
            "inbox": max(inbox, HEADS * QUERY_ROW_BYTES),
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += size
        return {**offsets, "end": end}

    scales_at = property(lambda self: self.offsets["scales"])
    scratch_at = property(lambda self: self.offsets["scratch"])
    own_at = property(lambda self: self.offsets["scratch"] + WEIGHTS_BYTES)
    maxima_at = property(lambda self: self.offsets["maxima"])
    sums_at = property(lambda self: self.offsets["sums"])
    undo_at = property(lambda self: self.offsets["undo"])
    sinks_at = property(lambda self: self.offsets["sinks"])
    stats_at = property(lambda self: self.offsets["stats"])
    inbox_at = property(lambda self: self.offsets["inbox"])
    query_at = property(lambda self: self.offsets["inbox"])
    shared_bytes = property(lambda self: self.offsets["end"])

    @property
    def ctas_per_sm(self) -> int:
        """What the registers are limited for."""
        return 2 if self.shared_bytes <= SHARED_BYTES_OF_TWO else 1

    def swizzle(self, granule: int, row: int) -> int:
        """Where a granule of a row lies within the row; works on run-time values too.

        Eight consecutive rows put the same granule into eight different 16-byte columns of the 128-byte bank line.
        """
        if self.row_granules % 8 == 0:
            return granule ^ (row & 7)
        # 36 granules: rows begin 64 bytes apart in turn, so the row's lowest bit does its part already.
        return granule ^ ((row >> 1) & 3)
