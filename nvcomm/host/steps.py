# SPDX-License-Identifier: Apache-2.0
"""Publish, collect, clear, advance: the steps that the host collectives are made of (docs/mailbox.md).

Each step is a method of its own, so that a test can break one rule alone (`nvcomm.host.mutations`).

Order. The full barrier at the beginning of a publish puts this rank's clears before it (R1), and x86-64 keeps the
stores that follow in order. No barrier stands between publish and collect: each word is its own flag (R4).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nvcomm.errors import CollectiveMismatchError
from nvcomm.host import escapes, headers
from nvcomm.host.faults import MISMATCH, TIMEOUT, Fault
from nvcomm.host.port import Port
from nvcomm.host.views import MailboxViews
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import EMPTY_WORD, Bytes, Words, clear_words, first_empty, full_barrier
from nvcomm.mailbox import (
    CHUNK_BYTES,
    CHUNK_WORDS,
    STATE_BROKEN,
    STATE_GENERATION,
    STATE_SLOT,
    WORD_BYTES,
    next_generation,
    next_slot,
    num_chunks,
)

# Collected and handed on at once: large enough to hide the interpreter, small enough to stay in the L2 cache, and
# whole escape records.
BLOCK_WORDS = 128 * escapes.WORDS_PER_RECORD
REPORTS_WITHIN_S = 0.2
FILL = 0xFF  # what a caller finds where nothing arrived: -1 as an index, NaN as a float (R10)


@dataclass(slots=True)
class Row:
    """A part of a row that is being collected.

    Attributes:
        src_rank: who writes it.
        words: the words to collect, a view of the own mailbox.
        out: where their bytes go; shorter than `words` where the last chunk is padded, empty for a token.
        records: the escape records of `words`, whose first word is then the first of a record; None: nothing is
            escaped.
        start: place of `words` in the row, for reports.
        done: words collected so far.
        missing: index of a word that was EMPTY when last seen, or -1: polling reads that one alone.
    """

    src_rank: int
    words: Words
    out: Bytes
    records: Words | None = None
    start: int = 0
    done: int = 0
    missing: int = -1


class Steps:
    """What one rank does with the mailboxes, call after call.

    Args:
        port: the rank's end of the mailboxes.
        device_checks: 1: ranks compare what they call (R11).
    """

    def __init__(self, port: Port, device_checks: int) -> None:
        self.port = port
        self.checks = device_checks > 0
        self._padded = np.zeros(0, np.uint32)

    def timeout_s(self) -> float:
        """Bound of this call's waits (R10)."""
        return self.port.timeout_s

    def empty_call(self) -> None:
        """Nobody sends: no mailbox is touched and nothing advances (R12)."""

    def pad(self, payload: Bytes) -> Words:
        """The payload as whole chunks, padded with 0; a view of it where it is whole and aligned."""
        chunks = num_chunks(len(payload))
        if len(payload) == chunks * CHUNK_BYTES:
            words = payload.view(np.uint32)
            if words.flags.aligned:
                return words
        if len(self._padded) < chunks * CHUNK_WORDS:
            self._padded = np.zeros(chunks * CHUNK_WORDS, np.uint32)
        words = self._padded[: chunks * CHUNK_WORDS]
        as_bytes = words.view(np.uint8)
        as_bytes[: len(payload)] = payload
        as_bytes[len(payload) :] = 0
        return words

    def escape(self, words: Words) -> tuple[Words, list[tuple[int, Words]], int]:
        """What travels instead of `words` (R5)."""
        return escapes.escape(words)

    def begin(self, call: headers.Call) -> None:
        """Before the first store of a publish."""
        full_barrier()  # R1: the clears of earlier calls come first
        self.port.transport.begin()
        if self.checks:
            header = headers.encode(call)
            slot = self.port.slot
            for dst_rank in self.destinations():
                target = self.port.mailboxes[dst_rank].headers[slot][self.port.rank]
                self.port.transport.store(self.port.lane(dst_rank, slot), target, header)

    def destinations(self) -> Iterator[int]:
        """Every rank, the following ones first: the ranks' stores spread, and the own copy comes last."""
        for i in range(1, self.port.world_size + 1):
            yield (self.port.rank + i) % self.port.world_size

    def send(self, dst_rank: int, target: Words, words: Words) -> None:
        """Sends words of this rank's row to one rank, this rank included (R2)."""
        if len(words):
            self.port.transport.store(self.port.lane(dst_rank, self.port.slot), target, words)

    def row_words(self, mailbox: MailboxViews, src_rank: int, num_words: int) -> Words:
        """The words of a call in a row, which starts at the same place whatever the size (R3)."""
        return mailbox.rows[self.port.slot][src_rank][:num_words]

    def sources(self) -> list[int]:
        """Whose rows are collected: everybody's, the own one first, as it arrives first (R2)."""
        rank, world_size = self.port.rank, self.port.world_size
        return [(rank + i) % world_size for i in range(world_size)]

    def collect(self, rows: list[Row], waiting: Waiting) -> None:
        """Hands every row on to its `out`, blocks in the order in which they arrive.

        Raises:
            PeerTimeoutError: a rank did not publish (R10). What it did not send is 0xFF in `out`.
        """
        rows = [row for row in rows if len(row.words)]
        while True:
            arrived = False
            for row in rows:
                while row.done < len(row.words) and self.collect_block(row):
                    arrived = True
                    if waiting.is_long:
                        self.note_wait(row.src_rank, waiting)
            rows = [row for row in rows if row.done < len(row.words)]
            if not rows:
                return
            if arrived:
                waiting.progress()
            elif not waiting.pause():
                for row in rows:
                    row.out[row.done * WORD_BYTES :] = FILL
                blamed = self.blame([row.src_rank for row in rows])
                row = next(row for row in rows if row.src_rank == blamed)
                raise self.timed_out(blamed, row.start + max(row.missing, row.done), waiting)

    def collect_block(self, row: Row) -> bool:
        """Hands the next block of a row on if all of it has arrived."""
        if row.missing >= 0 and row.words[row.missing] == EMPTY_WORD:
            return False
        start, stop = row.done, min(row.done + BLOCK_WORDS, len(row.words))
        block = row.words[start:stop]
        missing = self.first_missing(block)
        if missing >= 0:
            row.missing = start + missing
            return False
        row.missing = -1
        needed = escapes.records_needed(block) if row.records is not None else None
        if needed is not None:
            assert row.records is not None
            at = needed + start // escapes.WORDS_PER_RECORD
            records = row.records[at]
            if first_empty(records.reshape(-1)) >= 0:
                return False
            block = escapes.restore(block, needed, records)
            row.records[at] = EMPTY_WORD
        # The output is nobody else's: any copy will do.
        out = row.out[start * WORD_BYTES : stop * WORD_BYTES]
        out[:] = block.view(np.uint8)[: len(out)]
        self.clear(row, start, stop)
        row.done = stop
        return True

    def first_missing(self, block: Words) -> int:
        """Index of the first word that has not arrived, or -1: every word is looked at (R4)."""
        return first_empty(block)

    def clear(self, row: Row, start: int, stop: int) -> None:
        """Stores EMPTY over exactly what was collected (R3)."""
        clear_words(row.words[start:stop])

    def finish(self, payload: Bytes, out: Bytes) -> None:
        """A gather has collected everything that it waits for; its own row came like any other (R2)."""

    def advance(self, num_bytes: int) -> None:
        """Steps slot and generation in this rank's own memory (R6), after a call with `num_bytes` of payload."""
        self.port.counts.calls += 1
        self.port.counts.bytes += num_bytes
        self.step()

    def step(self) -> None:
        """The next slot and generation."""
        state = self.port.state
        state[STATE_SLOT] = next_slot(int(state[STATE_SLOT]))
        state[STATE_GENERATION] = next_generation(int(state[STATE_GENERATION]))

    def compare_headers(self, call: headers.Call, waiting: Waiting) -> None:
        """With checks on, collects what every rank says it is calling, and compares (R11).

        Raises:
            CollectiveMismatchError: they differ; the same text on every rank.
            PeerTimeoutError: a rank says nothing.
        """
        if not self.checks:
            return
        calls = {}
        for src_rank in range(self.port.world_size):
            words = self.port.own.headers[self.port.slot][src_rank]
            while first_empty(words) >= 0:
                if not waiting.pause():
                    raise self.timed_out(src_rank, 0, waiting)
            if waiting.is_long:
                self.note_wait(src_rank, waiting)
            waiting.progress()
            calls[src_rank] = headers.decode(words)
            clear_words(words)
        other = next((rank for rank, seen in calls.items() if seen != call), None)
        if other is not None:
            self.break_down(Fault(MISMATCH, self.port.rank, other, call.generation, self.port.slot, 0, 0))
            raise mismatch(calls)

    def blame(self, missing: list[int]) -> int:
        """Of the ranks whose words are missing, the first that has not itself reported that it waits."""
        faults = self.port.own.faults
        return next((rank for rank in missing if Fault.load(faults[rank]) is None), missing[0])

    def note_wait(self, src_rank: int, waiting: Waiting) -> None:
        """Statistics of a long wait."""
        waits = self.port.counts.longest_wait_us
        waits[src_rank] = max(waits[src_rank], int(waiting.waited_s * 1e6))

    def timed_out(self, src_rank: int, word: int, waiting: Waiting) -> Exception:
        """Breaks the rank and returns the error to raise (R10)."""
        self.note_wait(src_rank, waiting)
        port = self.port
        waited_us = int(waiting.waited_s * 1e6)
        fault = Fault(TIMEOUT, port.rank, src_rank, port.generation, port.slot, word, waited_us)
        self.break_down(fault)
        self.hear(src_rank)
        return fault.timeout_error(port.own.faults)

    def hear(self, src_rank: int) -> None:
        """Gives the rank that was waited for a moment to report that it gave up too: it is not the root then.

        Ranks that wait for each other began at nearly the same time, and so give up at nearly the same time.
        """
        deadline = time.monotonic() + REPORTS_WITHIN_S
        while Fault.load(self.port.own.faults[src_rank]) is None and time.monotonic() < deadline:
            time.sleep(1e-3)

    def break_down(self, fault: Fault) -> None:
        """Later calls touch no mailbox; every rank can read why in its fault row (R10)."""
        self.port.state[STATE_BROKEN] = fault.kind
        for mailbox in self.port.mailboxes:
            fault.store(mailbox.faults[self.port.rank])


def mismatch(calls: dict[int, headers.Call]) -> CollectiveMismatchError:
    """The error that every rank raises, with the same text."""
    listed = "; ".join(f"rank {rank} calls {call}" for rank, call in calls.items())
    return CollectiveMismatchError(
        f"ranks make different calls on one mailbox: {listed}. Make the same calls in the same order on every rank, "
        f"then call reset() on every rank."
    )
