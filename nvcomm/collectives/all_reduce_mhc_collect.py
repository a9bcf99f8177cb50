# SPDX-License-Identifier: Apache-2.0
"""The reduced chunk of a row, out of the mailbox: every rank's contribution (LL), or the owner's sum (two-shot)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_rows import poll_rows, waiting_for_sums
from nvcomm.collectives.all_reduce_tree import sum_rows
from nvcomm.device import WARP, Mailbox
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, EMPTY
from nvcomm.ptx import memory as ptx


class Collector:
    """Collecting for one `MhcConfig`. A `place` is a chunk's index, as in an all-reduce of (rows, hidden)."""

    def __init__(self, config: MhcConfig) -> None:
        self.config = config
        self.num_words = CHUNK_WORDS * (1 if config.two_shot else config.layout.world_size)

    def look(self, box: Mailbox, words: cute.Tensor, place: Int32, there: Boolean) -> None:
        """Reads a chunk's `num_words` in the mailbox as they are now; 0 where nothing is `there` to be read."""
        for r, addr in enumerate(self._addrs(box, place)):
            for i, word in enumerate(ptx.ld_relaxed_sys_v4_if(addr, there, (Uint32(0),) * CHUNK_WORDS)):
                words[r * CHUNK_WORDS + i] = word

    @cute.jit
    def collect(
        self, box: Mailbox, words: cute.Tensor, place: Int32, inside: Boolean, live: Boolean, wait: cute.Tensor
    ) -> list[Uint32]:
        """Waits for the words of a chunk, clears them (R3) and returns the reduced chunk."""
        config = self.config
        addrs = self._addrs(box, place)
        if const_expr(config.spin):
            first_rank = self._owner(place) if const_expr(config.two_shot) else 0
            patient = waiting_for_sums(box) if const_expr(config.two_shot) else box
            poll_rows(patient, words, addrs, place, 0, first_rank, wait)
        if const_expr(not config.publishes and config.pdl != "off"):
            cute.arch.griddepcontrol_wait()  # R1 (i): before the first store of any kind
        if inside & live:
            for addr in addrs:
                ptx.st_relaxed_sys_v4(addr, (Uint32(EMPTY),) * CHUNK_WORDS)
        lost = Uint32(live) - Uint32(1)  # all ones on a broken communicator: NaN (R10)
        held = [words[i] | lost for i in range(self.num_words)]
        return held if const_expr(config.two_shot) else sum_rows(held, config.layout.world_size, "bf16")

    def _addrs(self, box: Mailbox, place: Int32) -> tuple[Int64, ...]:
        """Where a chunk's words lie."""
        at = box.own + Int64(place) * CHUNK_BYTES
        if self.config.two_shot:
            return (at + box.row(self._owner(place)),)
        return tuple(at + box.row(r) for r in range(self.config.layout.world_size))

    def _owner(self, place: Int32) -> Int32:
        """The rank that owns a chunk (two-shot)."""
        return (place // WARP) % self.config.layout.world_size
