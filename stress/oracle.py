# SPDX-License-Identifier: Apache-2.0
"""What every word of every gather has to be: one definition for numpy on the host and for CuTe DSL on the device.

A payload word is a permutation of 32 bits applied to `key ^ index`, where `key` is again a permutation of (source
rank, gather, replay). So two different (rank, gather, replay) never give the same word at one index, and from a word
and a guessed index one computes the key, hence rank, gather and replay, backwards: a stale word names its origin
(decode.py). About 1 % of the words are then replaced by the two words that may not travel as they are (mailbox.md R5).

Every function is written with operators alone and takes `u32`, the type of a word: `numpy.uint32` with arrays of it,
or `cutlass.Uint32`. Plain Python integers stay below 2**31 here, as CuTe DSL would widen larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvcomm.mailbox import EMPTY

# Bits of the three fields of a key; together the 32 bits of a word.
RANK_SHIFT = 29
GATHER_SHIFT = 27
REPLAY_MASK = (1 << GATHER_SHIFT) - 1
# Of a run: beyond them words would repeat.
MAX_REPLAYS = REPLAY_MASK + 1
MAX_RANKS = 1 << (32 - RANK_SHIFT)
GATHERS_PER_REPLAY = 3

RESERVED_PER_65536 = 655  # 1 % of the words
MAX_LATE_NS = 20_000

# Two rounds of xor-shift and multiplication by an odd constant: each step is a permutation of the 32-bit words.
MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)
SHIFTS = (16, 13, 16)
LATE_SALT = 0x27D4EB2F

U32 = Callable[[Any], Any]


def mix(word: Any, u32: U32) -> Any:
    """A permutation of the 32-bit words in which every input bit reaches every output bit."""
    word = (word ^ (word >> u32(SHIFTS[0]))) * u32(MULTIPLIERS[0])
    word = (word ^ (word >> u32(SHIFTS[1]))) * u32(MULTIPLIERS[1])
    return word ^ (word >> u32(SHIFTS[2]))


def key(seed_key: Any, rank: Any, gather: Any, replay: Any, u32: U32) -> Any:
    """The key of one row of one gather: different for each (rank, gather, replay) within 2**27 replays."""
    fields = (rank << u32(RANK_SHIFT)) | (gather << u32(GATHER_SHIFT)) | (replay & u32(REPLAY_MASK))
    return mix(fields, u32) ^ seed_key


def payload(row_key: Any, index: Any, reserved_per_65536: Any, u32: U32) -> Any:
    """Word `index` of the row with this key; of 65,536 words so many are EMPTY or ESCAPE."""
    word = mix(row_key ^ index, u32)
    is_reserved = u32((word & u32(0xFFFF)) < reserved_per_65536)
    reserved = u32(EMPTY) | ((word >> u32(16)) & u32(1))  # ESCAPE is EMPTY with its lowest bit set
    return word ^ ((word ^ reserved) * is_reserved)


def late_ns(seed_key: Any, replay: Any, u32: U32) -> Any:
    """How long the late rank sleeps before the gathers of a replay: 0 to MAX_LATE_NS nanoseconds."""
    return mix(replay ^ seed_key ^ u32(LATE_SALT), u32) % u32(MAX_LATE_NS + 1)
