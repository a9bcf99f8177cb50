# SPDX-License-Identifier: Apache-2.0
"""A rank's ledger as the host reads it."""

from __future__ import annotations

from stress import ledger


def test_a_ledger_reads_as_it_was_written():
    words = [0] * ledger.LEDGER_WORDS
    words[0], words[ledger.GATHERS] = 1000, 3000
    assert ledger.read(words) == ledger.LedgerReading(1000, 3000, 0, None)
    words[ledger.BAD_WORDS], words[ledger.LOCK] = 7, 1
    words[ledger.FIRST_REPLAY : ledger.FIRST_SEEN + 1] = [900, 2, 3, 44, -5]
    assert ledger.read(words).first == ledger.Mismatch(900, 2, 3, 44, 0xFFFFFFFB)
    assert ledger.read(words).bad_words == 7


def test_a_count_of_wrong_words_that_went_round_is_not_none():
    words = [0] * ledger.LEDGER_WORDS
    words[ledger.LOCK] = 1
    assert ledger.read(words).bad_words == 1 << 32
