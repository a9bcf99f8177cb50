# SPDX-License-Identifier: Apache-2.0
"""The first half of a sublayer boundary: a rank publishes its contribution, or what two-shot makes of it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr

from nvcomm import device
from nvcomm.collectives import turn
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_mhc_rows import Boundary, Share
from nvcomm.collectives.all_reduce_owners import Owners
from nvcomm.collectives.all_reduce_source import Chunk, ExpertSource, Source, TensorSource
from nvcomm.collectives.all_reduce_tree import sendable
from nvcomm.collectives.turn import Place
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call
from nvcomm.mailbox import CHUNK_BYTES


class Publisher:
    """Publishing for one `MhcConfig`."""

    def __init__(self, config: MhcConfig) -> None:
        self.config = config
        flat = ReduceConfig(
            config.layout, "bf16", CHUNK_BYTES, config.multicast, config.pdl, spin=config.spin, delayed=config.delayed
        )
        self.owners = Owners(flat, config.threads)

    def source(self, work: Boundary) -> Source:
        """Where contributions come from."""
        shape = self.config.shape
        if self.config.part == "finalize":
            experts = (work.x, work.expert_weights, work.expert_indices, work.shared)
            return ExpertSource(*experts, shape.chunks, shape.top_k)
        return TensorSource(work.x, work.rows * shape.row_bytes, CHUNK_BYTES)

    @cute.jit
    def publish(
        self,
        box: Mailbox,
        at: Place,
        share: Share,
        source: Source,
        rows: Int32,
        call: Call,
        live: Boolean,
        wait: cute.Tensor,
    ) -> None:
        """Publishes all rows, by the protocol that the kernel was compiled for."""
        if const_expr(self.config.two_shot):
            self._sums(box, at, source, rows, call, live, wait)
        else:
            self._rows(box, share, source, rows, live)

    @cute.jit
    def _rows(self, box: Mailbox, share: Share, source: Source, rows: Int32, live: Boolean) -> None:
        """LL: publishes this thread's chunk of each of its rows; the first one is loaded beside the state."""
        ahead = self._load(source, share.first, share.chunk, rows)
        row = share.first
        while row < rows:
            words, place = ahead, row * self.config.shape.chunks + share.chunk
            row += share.step
            if row < rows:
                ahead = self._load(source, row, share.chunk, rows)
            if live & share.inside:
                device.publish_words(box, box.row(box.rank) + Int64(place) * CHUNK_BYTES, sendable(words))

    def _load(self, source: Source, row: Int32, chunk: Int32, rows: Int32) -> Chunk:
        """A chunk of a row; threads beyond its end load some other chunk, and publish nothing."""
        chunks = self.config.shape.chunks
        return source.chunk(cutlass.min(row * chunks + chunk, rows * chunks - 1))

    @cute.jit
    def _sums(
        self, box: Mailbox, at: Place, source: Source, rows: Int32, call: Call, live: Boolean, wait: cute.Tensor
    ) -> None:
        """Two-shot: sends all chunks that others own, then sums and publishes those that this rank owns.

        In between, with device checks, ranks compare what they call (R11): before any waits for another's chunks.
        """
        num_chunks = rows * self.config.shape.chunks
        words = self.owners.registers()
        spans = self.owners.spans(at)
        if const_expr(self.config.part == "finalize"):
            chunk = spans.first
            while chunk < num_chunks:
                for k in range_constexpr(1, self.config.layout.world_size):  # one after the other: registers
                    self.owners.load(words, source, chunk, num_chunks, box.rank, [k])
                    self.owners.send(box, words, chunk, num_chunks, live, k, k + 1)
                chunk += spans.step
        else:
            self.owners.load(words, source, spans.first, num_chunks, box.rank)
            self.owners.send_all(box, spans, words, source, num_chunks, live)
        num_bytes = rows * self.config.shape.row_bytes
        turn.compare(self.config, box, call, num_bytes, Boolean(at.index < WARP) & live, wait)
        self.owners.sum_all(box, spans, source, num_chunks, live, wait)
