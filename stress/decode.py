# SPDX-License-Identifier: Apache-2.0
"""Where a wrong word came from: its rank, gather, replay and index, computed back from its bits.

The oracle is a permutation, so for each index that the word may have had there is exactly one (rank, gather, replay).
All indices of a row are tried; only origins that exist (a rank of the world, a gather of a replay that has been, an
index inside that gather, the very same bits) count, and of these the most recent one is the answer. A random word
passes for a stale one of the last 1,000 replays with a probability of about 1e-3 for rows of a few thousand words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from nvcomm import mailbox
from stress import host_oracle, oracle, sum_oracle
from stress.host_oracle import HostOracle

# A stale word is at most a few replays old; older origins are more likely chance than history.
MAX_AGE_REPLAYS = 4096


# Words of sums: they hold too few bits of where they came from.
SUM_KINDS = {
    "sum": "the sum",
    "streams": "the residual streams of the boundary",
    "norm": "the normed output of the boundary",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent a word, in which gather of which replay, and at which index of the row, in words."""

    rank: int
    gather: int
    replay: int
    index: int


@dataclass(frozen=True, slots=True)
class BadWord:
    """A word that is not what it has to be.

    Attributes:
        dst_rank: the rank that received it.
        expected: what had to be there.
        expected_word: its bits.
        seen_word: the bits that were there.
        kind: "stale" (an earlier word; `seen` says which), "misplaced" (a word of the same gather), "early" (one that
            was not due yet), "reserved" (EMPTY or ESCAPE itself), "filled" (the 0xFF bytes of a timeout), "addend"
            (sent for a sum of a mixed run: too few bits to say for which), "unknown", or one of SUM_KINDS, whose
            `expected.rank` is `dst_rank`.
        seen: where the word came from, where that can be told.
    """

    dst_rank: int
    expected: Origin
    expected_word: int
    seen_word: int
    kind: str
    seen: Origin | None

    def as_json(self) -> dict[str, object]:
        """A JSON object; words as hexadecimal text."""
        fields = asdict(self)
        fields["expected_word"] = f"0x{self.expected_word:08x}"
        fields["seen_word"] = f"0x{self.seen_word:08x}"
        return fields

    @property
    def is_filling(self) -> bool:
        """Whether it may be what a call leaves that timed out: of a sum, NaNs."""
        halves = (self.seen_word & 0x7FFF, self.seen_word >> 16 & 0x7FFF)
        return self.kind == "filled" or (self.kind in SUM_KINDS and all(half > 0x7F80 for half in halves))

    def order(self) -> tuple[bool, int, int]:
        """Which wrong word of a run to show first: the earliest stale one, as others follow from those."""
        return (self.kind != "stale", self.expected.replay, self.expected.gather)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BadWord:
        """The inverse of `as_json`."""
        seen = fields["seen"]
        return cls(
            dst_rank=fields["dst_rank"],
            expected=Origin(**fields["expected"]),
            expected_word=int(fields["expected_word"], 16),
            seen_word=int(fields["seen_word"], 16),
            kind=fields["kind"],
            seen=None if seen is None else Origin(**seen),
        )

    def __str__(self) -> str:
        want = self.expected
        if self.kind in SUM_KINDS:
            return (
                f"rank {self.dst_rank} expected 0x{self.expected_word:08x} and saw 0x{self.seen_word:08x} in word "
                f"{want.index} of {SUM_KINDS[self.kind]} that is collective {want.gather} of replay {want.replay}"
            )
        head = (
            f"rank {self.dst_rank} expected word {want.index} of rank {want.rank}, gather {want.gather} of replay "
            f"{want.replay} (0x{self.expected_word:08x}) and saw 0x{self.seen_word:08x}: "
        )
        if self.seen is None:
            return head + {
                "reserved": "a reserved word that was not restored",
                "filled": "the filling of a call that timed out",
                "addend": "a word that was sent for a sum, another collective",
            }.get(self.kind, "no word that this run has sent")
        seen = self.seen
        where = f"word {seen.index} of rank {seen.rank}, gather {seen.gather} of replay {seen.replay}"
        return f"{head}{self.kind}, {where}"


def decode(
    host: HostOracle, dst_rank: int, expected: Origin, seen_word: int, row_words: Callable[[int, int], int]
) -> BadWord:
    """Explains a wrong word.

    Args:
        host: the run's oracle.
        dst_rank: the rank that received the word.
        expected: the place it was read from.
        seen_word: its bits.
        row_words: (gather, replay) -> 32-bit words per row of that gather.
    """
    seen = None
    if mailbox.is_reserved(seen_word):
        kind = "reserved"
    elif seen_word == 0xFFFFFFFF:
        kind = "filled"
    else:
        seen = _origin(host, expected, seen_word, row_words)
        kind = _kind(seen, expected) if seen else "addend" if sum_oracle.is_addend(seen_word) else "unknown"
    return BadWord(dst_rank, expected, host.word(*astuple(expected)), seen_word, kind, seen)


def _kind(seen: Origin, expected: Origin) -> str:
    when, due = (seen.replay, seen.gather), (expected.replay, expected.gather)
    return "stale" if when < due else "misplaced" if when == due else "early"


def _origin(host: HostOracle, expected: Origin, seen_word: int, row_words: Callable[[int, int], int]) -> Origin | None:
    """The most recent origin of a word, the expected index first."""
    first = max(0, expected.replay - MAX_AGE_REPLAYS)
    last = expected.replay + 1  # a rank that runs ahead may be in the next replay
    gathers = range(oracle.GATHERS_PER_REPLAY)
    longest = max(row_words(gather, replay) for gather in gathers for replay in range(first, last + 1))
    index = np.arange(longest, dtype=np.uint32)
    key = host_oracle.unmix(host_oracle.words(seen_word)) ^ index
    fields = host_oracle.unmix(key ^ np.uint32(host.seed_key))
    rank, gather = fields >> np.uint32(oracle.RANK_SHIFT), (fields >> np.uint32(oracle.GATHER_SHIFT)) & np.uint32(3)
    # Replays count modulo 2**27; an age is a difference, so it survives the wrap.
    age = (np.uint32(last) - (fields & np.uint32(oracle.REPLAY_MASK))) & np.uint32(oracle.REPLAY_MASK)
    exists = (rank < host.ranks) & (gather < oracle.GATHERS_PER_REPLAY) & (age <= last - first)
    found = [
        Origin(int(rank[i]), int(gather[i]), last - int(age[i]), int(index[i]))
        for i in np.flatnonzero(exists)
        if index[i] < row_words(int(gather[i]), last - int(age[i]))
    ]
    found = [origin for origin in found if host.word(*astuple(origin)) == seen_word]
    return min(found, key=lambda o: (o.index != expected.index, abs(expected.replay - o.replay)), default=None)
