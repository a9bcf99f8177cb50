# SPDX-License-Identifier: Apache-2.0
"""What a communicator counts while it works, in every world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one rank since its communicator was built.

    Attributes:
        calls: collectives that moved data.
        bytes: payload bytes that this rank contributed to them.
        escapes: chunks, of this rank's payloads, with a word that may not travel as it is (docs/mailbox.md R5).
        longest_wait_us: longest wait for each source rank, in microseconds. Sampled only after many failed polls:
            shorter waits cost nothing and read 0.
    """

    calls: int
    bytes: int
    escapes: int
    longest_wait_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """A rank's mailbox and state between two calls.

    Attributes:
        slot: the next call's slot; the same on every rank.
        generation: the next call's generation; the same on every rank.
        dirty_words: words of slots, records and headers that are not EMPTY: 0, or a rule was broken.
    """

    slot: int
    generation: int
    dirty_words: int
