# SPDX-License-Identifier: Apache-2.0
"""The first half of two-shot: contributions go to the owner of a chunk, who sums and publishes them.

Owners alternate every 32 chunks, so a thread's chunks come in spans: one of each owner's, 32 chunks apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import device, mailbox
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_rows import collect_rows, owner_of
from nvcomm.collectives.all_reduce_source import Source
from nvcomm.collectives.all_reduce_tree import sendable, sum_rows
from nvcomm.collectives.turn import Place
from nvcomm.device import WARP, Mailbox
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import memory as ptx


@dataclass(frozen=True)
class Spans:
    """A thread's spans.

    Attributes:
        first: its chunk of rank 0's in the first; those of the other owners follow at distances of 32.
        step: chunks from one span to the next.
    """

    first: Int32
    step: Int32


class Owners:
    """Sending and summing, in a kernel of `threads` threads a CTA. A `chunk` is rank 0's of a span."""

    def __init__(self, config: ReduceConfig, threads: int) -> None:
        self.config = config
        self.warps = threads // WARP
        self.span = WARP * config.world_size

    def spans(self, at: Place) -> Spans:
        """The spans of the thread at this place of the grid."""
        step = at.num_ctas * self.warps * self.span
        return Spans((at.cta * self.warps + at.thread // WARP) * self.span + at.thread % WARP, step)

    def registers(self) -> cute.Tensor:
        """For what `load` loads."""
        return cute.make_rmem_tensor(max(self.config.world_size - 1, 1) * CHUNK_WORDS, Uint32)

    def load(
        self,
        words: cute.Tensor,
        source: Source,
        chunk: Int32,
        num_chunks: Int32,
        rank: Int32,
        following: Sequence[int] | None = None,
    ) -> None:
        """A thread's chunks that others own; beyond the end the last chunk, which is not sent.

        `following` says which owners, counted from this rank on; default: all others.
        """
        for k in following or range(1, self.config.world_size):
            place = cutlass.min(chunk + owner_of(rank, k, self.config.world_size) * WARP, num_chunks - 1)
            for i, word in enumerate(source.chunk(place)):
                words[(k - 1) * CHUNK_WORDS + i] = word

    @cute.jit
    def send(
        self,
        box: Mailbox,
        words: cute.Tensor,
        chunk: Int32,
        num_chunks: Int32,
        live: Boolean,
        start: cutlass.Constexpr,
        stop: cutlass.Constexpr,
    ) -> None:
        """Sends contributions, each to the owner of its chunk: the owners `start` to `stop - 1` ranks from this one."""
        for k in range_constexpr(start, stop):
            place = chunk + owner_of(box.rank, k, self.config.world_size) * WARP
            if live & (place < num_chunks):
                sent = sendable([words[(k - 1) * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)])
                device.send_words(box, k, box.row(box.rank) + Int64(place) * CHUNK_BYTES, sent)

    @cute.jit
    def send_all(
        self, box: Mailbox, spans: Spans, words: cute.Tensor, source: Source, num_chunks: Int32, live: Boolean
    ) -> None:
        """Sends a thread's chunks in all of its spans; those of the first have been loaded into `words`."""
        chunk = spans.first
        while chunk < num_chunks:
            self.send(box, words, chunk, num_chunks, live, 1, self.config.world_size)
            chunk += spans.step
            if chunk < num_chunks:
                self.load(words, source, chunk, num_chunks, box.rank)

    @cute.jit
    def sum_all(
        self, box: Mailbox, spans: Spans, source: Source, num_chunks: Int32, live: Boolean, wait: cute.Tensor
    ) -> None:
        """Sums a thread's chunks that this rank owns, and publishes them."""
        chunk = spans.first
        while chunk < num_chunks:
            owned = chunk + box.rank * WARP
            if live & (owned < num_chunks):
                self._sum(box, source, owned, wait)
            chunk += spans.step

    @cute.jit
    def _sum(self, box: Mailbox, source: Source, chunk: Int32, wait: cute.Tensor) -> None:
        """Sums a chunk that this rank owns, and publishes the result unless this thread has timed out (R10)."""
        config, rank = self.config, box.rank
        own = sendable(source.chunk(chunk))
        words = cute.make_rmem_tensor(config.world_size * CHUNK_WORDS, Uint32)
        place = box.own + Int64(chunk) * CHUNK_BYTES
        addrs = tuple(place + box.row(r) for r in range(config.world_size))
        wanted = tuple(Boolean(rank != r) for r in range(config.world_size))
        collect_rows(box, words, addrs, wanted, own, chunk, 0, wait, config.spin)
        total = sum_rows([words[i] for i in range(config.world_size * CHUNK_WORDS)], config.world_size, config.dtype)
        if wait[0] >= 0:
            device.publish_words(box, box.row(rank) + Int64(chunk) * CHUNK_BYTES, sendable(total))
        for k in range_constexpr(1, config.world_size):
            addr = place + box.row(owner_of(rank, k, config.world_size))
            ptx.st_relaxed_sys_v4(addr, (Uint32(mailbox.EMPTY),) * CHUNK_WORDS)
