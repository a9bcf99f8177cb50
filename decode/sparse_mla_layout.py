# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: what is fixed at compile time, and where things lie in shared memory.

A CTA has 8 warps. Warp w = 2 * group + half takes a quarter of the columns, group `group`, and half of the 512 dims for
the scores, then dims 64 * w .. + 63 of all columns for the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from decode.kv_cache import SCALED_FP8, RecordLayout

COLUMNS = 128  # of a CTA
WIDE_COLUMNS = 160  # of a CTA where four of them take the place of five
WIDE_CHUNKS = 4
MAX_CHUNKS = 5
WARPS = 8
THREADS = 32 * WARPS
GRANULE = 16  # bytes of an asynchronous copy, and of a row of an 8x8 matrix of 16-bit values
HEADS = 16  # rows of a matrix instruction
UNIT_BYTES = 512  # a piece of partial output: 16 bytes a lane
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
        columns: of a CTA, 128, or 160, with which a cluster of 4 does for 640 (not for scaled records).
    """

    layout: RecordLayout
    chunks: int
    fp8_query: bool = False
    few_heads: bool = False
    sink: bool = False
    pdl: bool = True
    columns: int = COLUMNS

    @property
    def row_granules(self) -> int:
        """16-byte granules of a row of K."""
        return self.layout.data_bytes // GRANULE

    @property
    def scaled(self) -> bool:
        """Whether the records have scales and a BF16 part."""
        return self.layout == SCALED_FP8

    @property
    def group_columns(self) -> int:
        """Columns of the two warps that share them."""
        return self.columns // 4

    @property
    def tiles(self) -> int:
        """Tiles of 8 columns in a group."""
        return self.group_columns // 8

    @property
    def kept_tiles(self) -> int:
        """Tiles of a group that one of its two warps finishes; of 5 the other one finishes 2."""
        return -(-self.tiles // 2)

    @property
    def tight(self) -> bool:
        """Whether the query has to lie where the inbox will be, for the CTAs to fit on an SM."""
        return self.scaled or self.columns > COLUMNS

    @property
    def weights_bytes(self) -> int:
        """Probabilities, 16 bits each."""
        return self.columns * HEADS * 2

    @property
    def row_bytes(self) -> int:
        """From row to row of K: padded so that 8 rows lie in 8 different 16-byte columns, or swizzled (`swizzle`)."""
        return self.layout.data_bytes + (0 if self.scaled else GRANULE)

    @property
    def f16_parts(self) -> bool:
        """Partial outputs travel as F16."""
        return not self.scaled and self.layout.fp8_dims > 0

    @property
    def part_scale(self) -> float:
        """Scale of parts that travel: 128 products of a probability and an E4M3 value fit F16, 160 may not."""
        return 0.5 if self.f16_parts and self.columns > COLUMNS else 1.0

    @property
    def head_halves(self) -> int:
        """Halves of 8 heads that there are."""
        return 1 if self.few_heads else 2

    @property
    def unit_tiles(self) -> int:
        """Groups of 16 dims in a unit."""
        return 2 if self.f16_parts else 1

    @property
    def warp_units(self) -> int:
        """Units that a warp computes: a unit is 8 heads x 32 dims as F16, or 8 heads x 16 dims as F32."""
        return self.head_halves * 4 // self.unit_tiles

    @property
    def units(self) -> int:
        """Units of a CTA."""
        return WARPS * self.warp_units

    @property
    def unit_slots(self) -> int:
        """Units that a CTA finishes: unit u belongs to CTA u % chunks, as its piece u // chunks."""
        return -(-self.units // self.chunks)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where each area begins, in bytes, and under "end" how many there are.

        rows: the rows of K, see `row_bytes`. scales: for scaled records 2 x columns x 8 bytes, a
        copy for each half of the dims, so that a warp waits for its own copies only. scratch: partial scores between
        the warps of a pair; later the probabilities in fragment order, and behind them this CTA's own partial outputs.
        maxima and sums: 16 heads x 8 warps. undo: what undoes the scaling of each head's query. sinks: of 16 heads.
        stats: (m, l) of every CTA for 16 heads. mbarriers: of the inbox and of the stats. inbox: partial outputs
        from the other CTAs. query: 16 heads; for scaled records in the same place as the inbox, which is filled later.
        """
        own = self.unit_slots * UNIT_BYTES if self.chunks > 1 else 0
        inbox = (self.chunks - 1) * self.unit_slots * UNIT_BYTES
        query = HEADS * QUERY_ROW_BYTES
        sizes = {
            "rows": self.columns * self.row_bytes,
            "scales": 2 * self.columns * self.layout.scale_bytes,
            "scratch": max(WARPS * self.kept_tiles * 512, self.weights_bytes + own),
            "maxima": HEADS * WARPS * 4,
            "sums": HEADS * WARPS * 4,
            "undo": HEADS * 4,
            "sinks": HEADS * 4,
            "stats": MAX_CHUNKS * HEADS * 8,
            "mbarriers": 16,
            "inbox": max(inbox, query) if self.tight else inbox,
            "query": 0 if self.tight else query,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += size
        return {**offsets, "end": end}

    scales_at = property(lambda self: self.offsets["scales"])
    scratch_at = property(lambda self: self.offsets["scratch"])
    own_at = property(lambda self: self.offsets["scratch"] + self.weights_bytes)
    maxima_at = property(lambda self: self.offsets["maxima"])
    sums_at = property(lambda self: self.offsets["sums"])
    undo_at = property(lambda self: self.offsets["undo"])
    sinks_at = property(lambda self: self.offsets["sinks"])
    stats_at = property(lambda self: self.offsets["stats"])
    mbarriers_at = property(lambda self: self.offsets["mbarriers"])
    inbox_at = property(lambda self: self.offsets["inbox"])
    query_at = property(lambda self: self.offsets["inbox" if self.tight else "query"])
    shared_bytes = property(lambda self: self.offsets["end"])

    @property
    def ctas_per_sm(self) -> int:
        """What the registers are limited for."""
        return 2 if self.shared_bytes <= SHARED_BYTES_OF_TWO else 1

    def swizzle(self, granule: int, row: int) -> int:
        """Where a granule of a row lies within the row; works on run-time values too.

        Eight consecutive rows put the same granule into eight different 16-byte columns of the 128-byte bank line.
        """
        if self.scaled:
            # 36 granules: rows begin 64 bytes apart in turn, so the row's lowest bit does its part already.
            return granule ^ ((row >> 1) & 3)
        return granule
