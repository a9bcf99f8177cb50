# SPDX-License-Identifier: Apache-2.0
"""`late-copy`: the widely used Lamport all-gather, known to be wrong; the negative control of tests and stress.

Three habits that are each harmless alone (docs/mailbox.md R2, R3):

- rows are packed by the call's size, so the place of a word belongs to another rank in a call of another size;
- the own row is taken from registers instead of waited for;
- so the own copy may still be on its way when its place is cleared.

Such a copy lands behind the clear and is read as another rank's word two calls later. On the direct transport, where
nothing is ever on its way, the copy is held back past the next call's clear; on the delayed one it happens by itself.
"""

from __future__ import annotations

from nvcomm.host import headers
from nvcomm.host.all_gather import AllGather
from nvcomm.host.port import Port
from nvcomm.host.transport import DirectTransport
from nvcomm.host.views import MailboxViews
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Bytes, Words, clear_words, store_words


class LateCopy(AllGather):
    """The known-bad protocol, whole."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._arranged = isinstance(port.transport, DirectTransport)
        self._sent: list[tuple[Words, Words]] = []
        self._late: list[tuple[Words, Words]] = []

    def run(self, payload: Bytes, out: Bytes, call: headers.Call) -> None:
        """See `AllGather.run`."""
        super().run(payload, out, call)
        out[self.port.rank] = payload

    def row_words(self, mailbox: MailboxViews, slot: int, src_rank: int, num_words: int) -> Words:
        """Packed: where row `src_rank` starts depends on the call's size."""
        return mailbox.slots[slot][src_rank * num_words : (src_rank + 1) * num_words]

    def publish_row(self, dst_rank: int, lane: int, target: Words, words: Words) -> None:
        """The own copy takes its time."""
        if self._arranged and dst_rank == self.port.rank:
            self._sent.append((target, words.copy()))
        else:
            super().publish_row(dst_rank, lane, target, words)

    def sources(self) -> list[int]:
        """Everybody but this rank."""
        return [rank for rank in super().sources() if rank != self.port.rank]

    def collect(self, slot: int, num_words: int, out: Bytes, waiting: Waiting) -> None:
        """Collects the others' rows, then clears the own one without having seen it."""
        super().collect(slot, num_words, out, waiting)
        clear_words(self.row_words(self.port.own, slot, self.port.rank, num_words))
        for target, words in self._late:
            store_words(target, words)
        self._late, self._sent = self._sent, []
