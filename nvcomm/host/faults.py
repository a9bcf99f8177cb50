# SPDX-License-Identifier: Apache-2.0
"""What a rank that gave up saw, and who is at the bottom of it (docs/mailbox.md R10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nvcomm.errors import PeerTimeoutError
from nvcomm.host.words import Words, store_words
from nvcomm.mailbox import FAULT_WORDS

# Kinds of a record, the same as those that kernels write.
TIMEOUT, MISMATCH = 1, 3
_MAX_US = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that broke a rank; FAULT_WORDS words in every mailbox's fault row, in this order.

    Attributes:
        kind: `TIMEOUT` or `MISMATCH`; 0 in memory: nothing happened.
        rank: the rank that saw it.
        src_rank: the rank it waited for, or that called something else.
        generation: of the call.
        slot: of the call.
        word: index of the first missing word in the row of `src_rank`.
        waited_us: how long it waited.
    """

    kind: int
    rank: int
    src_rank: int
    generation: int
    slot: int
    word: int
    waited_us: int

    def store(self, row: Words) -> None:
        """Writes the record; the kind last, so that whoever reads a kind reads the whole record."""
        words = np.zeros(FAULT_WORDS, np.uint32)
        waited_us = min(self.waited_us, _MAX_US)
        words[:7] = (self.kind, self.rank, self.src_rank, self.generation, self.slot, self.word, waited_us)
        store_words(row[1:], words[1:])
        store_words(row[:1], words[:1])

    @classmethod
    def load(cls, row: Words) -> Fault | None:
        """The record in a fault row, or None."""
        kind = int(row[0])
        return cls(kind, *(int(word) for word in row[1:7])) if kind else None

    def timeout_error(self, faults: Words) -> PeerTimeoutError:
        """The error to raise, with the root as the fault rows tell it now."""
        return PeerTimeoutError(
            self.rank,
            self.src_rank,
            generation=self.generation,
            slot=self.slot,
            word=self.word,
            waited_s=self.waited_us / 1e6,
            root_rank=find_root(self, faults),
        )


def find_root(fault: Fault, faults: Words) -> int:
    """Follows "waited for" to the rank that reported nothing itself; a circle ends where it closes."""
    seen = {fault.rank}
    rank = fault.src_rank
    while rank not in seen and rank < len(faults):
        seen.add(rank)
        record = Fault.load(faults[rank])
        if record is None or record.kind != TIMEOUT:
            return rank
        rank = record.src_rank
    return fault.src_rank
