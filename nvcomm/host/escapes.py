# SPDX-License-Identifier: Apache-2.0
"""Reserved words never travel as payload (docs/mailbox.md R5): escape before publish, restore after collect.

A payload word that equals EMPTY or ESCAPE is sent as ESCAPE; a record of 8 words says which of its 128 words were
EMPTY. Word i of the 128 is bit `i % 16` of record word `i // 16`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvcomm.host.words import EMPTY_WORD, ESCAPE_WORD, Words
from nvcomm.mailbox import CHUNK_WORDS, CHUNKS_PER_RECORD, RECORD_BITS, RECORD_TAG, RECORD_WORDS

WORDS_PER_RECORD = CHUNKS_PER_RECORD * CHUNK_WORDS
_BITS = np.left_shift(np.uint32(1), np.arange(RECORD_BITS, dtype=np.uint32))


def escape(words: Words) -> tuple[Words, list[tuple[int, Words]], int]:
    """What travels instead of `words`.

    Args:
        words: a payload of whole chunks; not changed.

    Returns:
        The words to send (`words` itself where nothing is reserved, the common path); runs of records, each as index
        of its first record and (n, RECORD_WORDS) words; and the number of chunks with a reserved word.
    """
    reserved = np.equal(np.bitwise_or(words, np.uint32(1)), ESCAPE_WORD)
    if not np.count_nonzero(reserved):
        return words, [], 0
    records = _encode(np.equal(words, EMPTY_WORD))
    touched = np.unique(np.flatnonzero(reserved) // WORDS_PER_RECORD)
    runs = np.split(touched, np.flatnonzero(np.diff(touched) > 1) + 1)
    num_chunks = np.count_nonzero(reserved.reshape(-1, CHUNK_WORDS).any(axis=1))
    sent = np.where(reserved, ESCAPE_WORD, words)
    return sent, [(int(run[0]), records[run[0] : run[-1] + 1]) for run in runs], int(num_chunks)


def records_needed(words: Words) -> npt.NDArray[np.intp] | None:
    """Indices of the records that restore `words`, counted from their first; None where nothing was escaped."""
    escaped = np.equal(words, ESCAPE_WORD)
    if not np.count_nonzero(escaped):
        return None
    return np.unique(np.flatnonzero(escaped) // WORDS_PER_RECORD)


def restore(words: Words, needed: npt.NDArray[np.intp], records: Words) -> Words:
    """The payload that was escaped.

    Args:
        words: what arrived, beginning with a record's first word; not changed.
        needed: what `records_needed(words)` returned.
        records: (len(needed), RECORD_WORDS), complete.
    """
    was_empty = np.zeros((-(-len(words) // WORDS_PER_RECORD), RECORD_WORDS, RECORD_BITS), bool)
    was_empty[needed] = np.bitwise_and(records[:, :, None], _BITS) != 0
    return np.where(was_empty.reshape(-1)[: len(words)], EMPTY_WORD, words)


def _encode(was_empty: npt.NDArray[np.bool_]) -> Words:
    padded = np.zeros(-(-len(was_empty) // WORDS_PER_RECORD) * WORDS_PER_RECORD, bool)
    padded[: len(was_empty)] = was_empty
    flags = padded.reshape(-1, RECORD_WORDS, RECORD_BITS)
    return np.bitwise_or(np.where(flags, _BITS, np.uint32(0)).sum(axis=2, dtype=np.uint32), np.uint32(RECORD_TAG))
