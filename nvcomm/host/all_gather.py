# SPDX-License-Identifier: Apache-2.0
"""All-gather between CPU ranks: publish, collect, clear, by the rules of docs/mailbox.md.

A call publishes its payload into row `rank` of the slot in every mailbox, the own one last, then collects block after
block of every row as it arrives, its own row included (R2), and clears each block once it has been handed on (R3).
Each step is a method of its own, so that a test can break one rule alone (`nvcomm.host.mutations`).

Order. The full barrier before the first store of a publish puts this rank's clears before it (R1), and x86-64 keeps
the stores that follow in order. No barrier stands between publish and collect: each word is its own flag (R4).
"""

from __future__ import annotations

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
FILL = 0xFF  # what a caller finds where nothing arrived: -1 as an index, NaN as a float (R10)


@dataclass(slots=True)
class Row:
    """A row that is being collected.

    Attributes:
        src_rank: who writes it.
        words: this call's words of the row.
        records: the row's escape records.
        done: words collected so far.
        missing: index of a word that was EMPTY when last seen, or -1: polling reads that one alone.
    """

    src_rank: int
    words: Words
    records: Words
    done: int = 0
    missing: int = -1


class AllGather:
    """The all-gather of one rank, call after call.

    Args:
        port: the rank's end of the mailboxes.
        device_checks: 1: ranks compare what they call (R11).
    """

    def __init__(self, port: Port, device_checks: int) -> None:
        self.port = port
        self.checks = device_checks > 0
        self._padded = np.zeros(0, np.uint32)

    def run(self, payload: Bytes, out: Bytes, call: headers.Call) -> None:
        """Gathers `payload` of every rank.

        Args:
            payload: (num_bytes,), at most the layout's `max_bytes`.
            out: (world_size, num_bytes), overwritten.
            call: what is called, for R11.

        Raises:
            PeerTimeoutError: a rank did not publish (R10). What it did not send is 0xFF in `out`.
            CollectiveMismatchError: ranks call different things (R11). `out` is 0xFF.
        """
        if not len(payload) and not self.checks:
            self.empty_call()
            return
        slot = self.port.slot
        words = self.pad(payload)
        waiting = Waiting(self.timeout_s())
        self.publish(slot, words, call)
        if self.checks:
            self.compare_headers(slot, out, call, waiting)
        self.collect(slot, len(words), out, waiting)
        self.port.counts.calls += 1
        self.port.counts.bytes += len(payload)
        self.advance()

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

    def publish(self, slot: int, words: Words, call: headers.Call) -> None:
        """Stores the payload into row `rank` of every mailbox, with what it takes to restore it."""
        port = self.port
        sent, runs, num_escapes = self.escape(words)
        port.counts.escapes += num_escapes
        header = headers.encode(call) if self.checks else None
        full_barrier()  # R1: the clears of earlier calls come first
        port.transport.begin()
        for i in range(1, port.world_size + 1):
            dst_rank = (port.rank + i) % port.world_size
            mailbox = port.mailboxes[dst_rank]
            lane = port.lane(dst_rank, slot)
            if header is not None:
                port.transport.store(lane, mailbox.headers[slot][port.rank], header)
            if len(sent):
                self.publish_row(dst_rank, lane, self.row_words(mailbox, slot, port.rank, len(sent)), sent)
            for first, records in runs:
                target = mailbox.records[slot][port.rank][first : first + len(records)]
                port.transport.store(lane, target.reshape(-1), records.reshape(-1))

    def escape(self, words: Words) -> tuple[Words, list[tuple[int, Words]], int]:
        """What travels instead of `words` (R5)."""
        return escapes.escape(words)

    def row_words(self, mailbox: MailboxViews, slot: int, src_rank: int, num_words: int) -> Words:
        """The words of a call in a row, which starts at the same place whatever the size (R3)."""
        return mailbox.rows[slot][src_rank][:num_words]

    def publish_row(self, dst_rank: int, lane: int, target: Words, words: Words) -> None:
        """Sends the payload to one rank, this rank included (R2)."""
        self.port.transport.store(lane, target, words)

    def sources(self) -> list[int]:
        """Whose rows are collected: everybody's, the own one first, as it arrives first (R2)."""
        rank, world_size = self.port.rank, self.port.world_size
        return [(rank + i) % world_size for i in range(world_size)]

    def collect(self, slot: int, num_words: int, out: Bytes, waiting: Waiting) -> None:
        """Hands every row on to `out`, blocks in the order in which they arrive."""
        own = self.port.own
        rows = [Row(r, self.row_words(own, slot, r, num_words), own.records[slot][r]) for r in self.sources()]
        while True:
            arrived = False
            for row in rows:
                while row.done < num_words and self.collect_block(row, out[row.src_rank]):
                    arrived = True
                    if waiting.is_long:
                        self.note_wait(row.src_rank, waiting)
            rows = [row for row in rows if row.done < num_words]
            if not rows:
                return
            if arrived:
                waiting.progress()
            elif not waiting.pause():
                for row in rows:
                    out[row.src_rank, row.done * WORD_BYTES :] = FILL
                blamed = self.blame([row.src_rank for row in rows])
                row = next(row for row in rows if row.src_rank == blamed)
                raise self.timed_out(slot, blamed, max(row.missing, row.done), waiting)

    def collect_block(self, row: Row, out: Bytes) -> bool:
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
        needed = escapes.records_needed(block)
        if needed is not None:
            at = needed + start // escapes.WORDS_PER_RECORD
            records = row.records[at]
            if first_empty(records.reshape(-1)) >= 0:
                return False
            block = escapes.restore(block, needed, records)
            row.records[at] = EMPTY_WORD
        # The output is nobody else's: any copy will do.
        out[start * WORD_BYTES : stop * WORD_BYTES] = block.view(np.uint8)[: len(out) - start * WORD_BYTES]
        self.clear(row, start, stop)
        row.done = stop
        return True

    def first_missing(self, block: Words) -> int:
        """Index of the first word that has not arrived, or -1: every word is looked at (R4)."""
        return first_empty(block)

    def clear(self, row: Row, start: int, stop: int) -> None:
        """Stores EMPTY over exactly what was collected (R3)."""
        clear_words(row.words[start:stop])

    def advance(self) -> None:
        """Steps slot and generation in this rank's own memory (R6)."""
        state = self.port.state
        state[STATE_SLOT] = next_slot(int(state[STATE_SLOT]))
        state[STATE_GENERATION] = next_generation(int(state[STATE_GENERATION]))

    def compare_headers(self, slot: int, out: Bytes, call: headers.Call, waiting: Waiting) -> None:
        """Collects what every rank says it is calling, and compares (R11)."""
        calls = {}
        for src_rank in range(self.port.world_size):
            words = self.port.own.headers[slot][src_rank]
            while first_empty(words) >= 0:
                if not waiting.pause():
                    out[...] = FILL
                    raise self.timed_out(slot, src_rank, 0, waiting)
            if waiting.is_long:
                self.note_wait(src_rank, waiting)
            waiting.progress()
            calls[src_rank] = headers.decode(words)
            clear_words(words)
        other = next((rank for rank, seen in calls.items() if seen != call), None)
        if other is not None:
            out[...] = FILL
            self.break_down(Fault(MISMATCH, self.port.rank, other, call.generation, slot, 0, 0))
            raise mismatch(calls)

    def blame(self, missing: list[int]) -> int:
        """Of the ranks whose words are missing, the first that has not itself reported that it waits."""
        faults = self.port.own.faults
        return next((rank for rank in missing if Fault.load(faults[rank]) is None), missing[0])

    def note_wait(self, src_rank: int, waiting: Waiting) -> None:
        """Statistics of a long wait."""
        waits = self.port.counts.longest_wait_us
        waits[src_rank] = max(waits[src_rank], int(waiting.waited_s * 1e6))

    def timed_out(self, slot: int, src_rank: int, word: int, waiting: Waiting) -> Exception:
        """Breaks the rank and returns the error to raise (R10)."""
        self.note_wait(src_rank, waiting)
        waited_us = int(waiting.waited_s * 1e6)
        fault = Fault(TIMEOUT, self.port.rank, src_rank, self.port.generation, slot, word, waited_us)
        self.break_down(fault)
        return fault.timeout_error(self.port.own.faults)

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
