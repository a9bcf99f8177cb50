# SPDX-License-Identifier: Apache-2.0
"""A rank's ledger in device memory: the replay counter, and what the checks found. 32-bit words.

Graphs freeze their arguments, so the number of a replay lives here. Each turn kernel of a graph reads the cell that
the kernel before it wrote and writes the next one: no kernel reads and writes the same cell, so it needs no atomics.
The last turn of a graph writes cell 0, where the next launch, of whatever graph, begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_CELLS = 32
BAD_WORDS = NUM_CELLS
LOCK = NUM_CELLS + 1  # 1 once a mismatch took the record below
FIRST_REPLAY = NUM_CELLS + 2
FIRST_GATHER = NUM_CELLS + 3
FIRST_SRC_RANK = NUM_CELLS + 4
FIRST_INDEX = NUM_CELLS + 5
FIRST_SEEN = NUM_CELLS + 6
GATHERS = NUM_CELLS + 7
FIRST_WANTED = NUM_CELLS + 8  # of a sum alone: what a gather's word has to be follows from its place
LEDGER_WORDS = NUM_CELLS + 9


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A wrong word as the device saw it: `seen` at `index` of row `src_rank` of a gather.

    Of a sum: `wanted` had to be there; `src_rank` is 0, and 1 for the normed output of a boundary.
    """

    replay: int
    gather: int
    src_rank: int
    index: int
    seen: int
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """What a ledger says: replays begun, gathers checked, wrong words, and the first of them."""

    replay: int
    gathers: int
    bad_words: int
    first: Mismatch | None


def read(words: Sequence[int]) -> LedgerReading:
    """Reads a ledger that was copied to the host; words may come as signed integers."""
    ledger = [int(word) & 0xFFFFFFFF for word in words]
    first = None
    if ledger[LOCK]:
        replay, gather, src_rank, index, seen = ledger[FIRST_REPLAY : FIRST_SEEN + 1]
        first = Mismatch(replay, gather, src_rank, index, seen, ledger[FIRST_WANTED])
    # Counted modulo 2**32: a count that reads 0 behind a wrong word has gone round.
    bad_words = ledger[BAD_WORDS] or (1 << 32 if first else 0)
    return LedgerReading(ledger[0], ledger[GATHERS], bad_words, first)
