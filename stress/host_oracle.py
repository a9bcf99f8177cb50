# SPDX-License-Identifier: Apache-2.0
"""The oracle in numpy: rows to send, and rows to compare with. Also the oracle's inverse, for decoding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvcomm.errors import UsageError
from stress import oracle

Words = npt.NDArray[np.uint32]

_INVERSES = tuple(pow(multiplier, -1, 1 << 32) for multiplier in oracle.MULTIPLIERS)


def words(*values: int) -> Words:
    """An array of 32-bit words. numpy wraps array arithmetic silently, as the device does; scalars would warn."""
    return np.array([value & 0xFFFFFFFF for value in values], dtype=np.uint32)


def mix_int(value: int) -> int:
    """`oracle.mix` of one word."""
    return int(oracle.mix(words(value), np.uint32)[0])


def seed_key(seed: int) -> int:
    """The 32-bit key of a seed of up to 64 bits."""
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"seed {seed} is outside 0 .. 2**64 - 1: choose one inside")
    return mix_int(mix_int(seed >> 32) ^ (seed & 0xFFFFFFFF))


def row_keys(seed_key_: int, ranks: int, gather: int, replay: int) -> Words:
    """(ranks,) the keys of the rows of one gather."""
    rank = np.arange(ranks, dtype=np.uint32)
    return oracle.key(words(seed_key_), rank, words(gather), words(replay), np.uint32)


class HostOracle:
    """Payloads of one run.

    Args:
        seed: the run's seed.
        ranks: rows of a gather.
        reserved_per_65536: how many words of 65,536 may not travel as they are.
    """

    def __init__(self, seed: int, ranks: int, reserved_per_65536: int = oracle.RESERVED_PER_65536) -> None:
        self.seed_key = seed_key(seed)
        self.ranks = ranks
        self._reserved = np.uint32(reserved_per_65536)
        self._index = np.arange(0, dtype=np.uint32)

    def row(self, rank: int, gather: int, replay: int, num_words: int) -> Words:
        """(num_words,) what `rank` sends."""
        row_key = row_keys(self.seed_key, self.ranks, gather, replay)[rank : rank + 1]
        return oracle.payload(row_key, self._indices(num_words), self._reserved, np.uint32)

    def rows(self, gather: int, replay: int, num_words: int) -> Words:
        """(ranks, num_words) what every rank has to receive."""
        keys = row_keys(self.seed_key, self.ranks, gather, replay)
        return oracle.payload(keys[:, None], self._indices(num_words)[None, :], self._reserved, np.uint32)

    def word(self, rank: int, gather: int, replay: int, index: int) -> int:
        """One word of a row."""
        row_key = row_keys(self.seed_key, self.ranks, gather, replay)[rank : rank + 1]
        return int(oracle.payload(row_key, words(index), self._reserved, np.uint32)[0])

    def late_ns(self, replay: int) -> int:
        """Nanoseconds that the late rank of a replay sleeps."""
        return int(oracle.late_ns(words(self.seed_key), words(replay), np.uint32)[0])

    def _indices(self, count: int) -> Words:
        if count > len(self._index):
            self._index = np.arange(count, dtype=np.uint32)
        return self._index[:count]


def unmix(word: Words) -> Words:
    """The inverse of `oracle.mix`."""
    for shift, inverse in zip(oracle.SHIFTS[:0:-1], reversed(_INVERSES), strict=True):
        word = _unshift(word, shift) * np.uint32(inverse)
    return _unshift(word, oracle.SHIFTS[0])


def _unshift(word: Words, shift: int) -> Words:
    """Solves `word = x ^ (x >> shift)` for x: each pass makes `shift` more of the upper bits right."""
    solved = word
    for _ in range(32 // shift):
        solved = word ^ (solved >> np.uint32(shift))
    return solved
