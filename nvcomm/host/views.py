# SPDX-License-Identifier: Apache-2.0
"""The parts of a mailbox as numpy views, made once: a gather slices them and computes no address."""

from __future__ import annotations

from nvcomm.host.words import Words
from nvcomm.mailbox import FAULT_WORDS, HEADER_WORDS, NUM_SLOTS, RECORD_WORDS, WORD_BYTES, MailboxLayout


class MailboxViews:
    """One rank's mailbox.

    Attributes:
        armed: everything that holds EMPTY between calls.
        slots: [slot]: (world_size * row_words,).
        rows: [slot][src_rank]: (row_words,).
        records: [slot][src_rank]: (records_per_row, RECORD_WORDS).
        headers: [slot][src_rank]: (HEADER_WORDS,).
        faults: (world_size, FAULT_WORDS), 0 where a rank reported nothing.
    """

    def __init__(self, words: Words, layout: MailboxLayout) -> None:
        ranks = range(layout.world_size)
        slots = range(NUM_SLOTS)

        def part(offset_bytes: int, num_words: int) -> Words:
            start = offset_bytes // WORD_BYTES
            return words[start : start + num_words]

        record_words = layout.records_per_row * RECORD_WORDS
        self.armed = part(0, layout.faults_base // WORD_BYTES)
        self.slots = [part(layout.row_offset(s, 0), layout.slot_bytes // WORD_BYTES) for s in slots]
        self.rows = [[part(layout.row_offset(s, r), layout.row_words) for r in ranks] for s in slots]
        self.records = [
            [part(layout.record_offset(s, r, 0), record_words).reshape(-1, RECORD_WORDS) for r in ranks] for s in slots
        ]
        self.headers = [[part(layout.header_offset(s, r), HEADER_WORDS) for r in ranks] for s in slots]
        self.faults = part(layout.faults_base, layout.world_size * FAULT_WORDS).reshape(-1, FAULT_WORDS)
