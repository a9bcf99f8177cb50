# SPDX-License-Identifier: Apache-2.0
"""`late-copy`: the widely used Lamport all-gather, known to be wrong; the negative control of tests and stress.

Three habits that are each harmless alone (docs/mailbox.md R2, R3):

- rows are packed by the call's size, so the place of a word belongs to another rank in a call of another size;
- the own row is taken from registers instead of waited for;
- so the own copy may still be on its way when its place is cleared.

Such a copy lands behind the clear and is read as another rank's word two calls later. On the direct transport, where
nothing is ever on its way, the copy is held back past the next call's clear; on the delayed one it happens by itself.
A rank that has read stale words runs ahead of the others, so a timeout may follow the first wrong word.
"""

from __future__ import annotations

from nvcomm.host.port import Port
from nvcomm.host.steps import Steps
from nvcomm.host.transport import DirectTransport
from nvcomm.host.views import MailboxViews
from nvcomm.host.words import Bytes, Words, clear_words, store_words
from nvcomm.mailbox import CHUNK_WORDS, num_chunks


class LateCopy(Steps):
    """The steps of the known-bad protocol, whole. For all-gathers alone."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._arranged = isinstance(port.transport, DirectTransport)
        self._sent: list[tuple[Words, Words]] = []
        self._late: list[tuple[Words, Words]] = []

    def row_words(self, mailbox: MailboxViews, src_rank: int, num_words: int) -> Words:
        """Packed: where row `src_rank` starts depends on the call's size."""
        return mailbox.slots[self.port.slot][src_rank * num_words : (src_rank + 1) * num_words]

    def send(self, dst_rank: int, target: Words, words: Words) -> None:
        """The own copy takes its time."""
        if self._arranged and dst_rank == self.port.rank:
            self._sent.append((target, words.copy()))
        else:
            super().send(dst_rank, target, words)

    def sources(self) -> list[int]:
        """Everybody but this rank."""
        return [rank for rank in super().sources() if rank != self.port.rank]

    def finish(self, payload: Bytes, out: Bytes) -> None:
        """Takes the own row from registers, and clears its place without having seen it."""
        out[self.port.rank] = payload
        num_words = num_chunks(len(payload)) * CHUNK_WORDS
        clear_words(self.row_words(self.port.own, self.port.rank, num_words))
        for target, words in self._late:
            store_words(target, words)
        self._late, self._sent = self._sent, []
