# SPDX-License-Identifier: Apache-2.0
"""What every value of every sum has to be: one definition for numpy on the host and for CuTe DSL on the device.

A rank contributes the numbers of its payload: the low 5 bits of each half word, as bf16. Sums of them over at most 8
ranks are whole numbers below 256, exact in bf16 in any order, so each follows from the oracle alone. A payload word
that may not travel as it is (docs/mailbox.md R5) is contributed as such, two NaNs, and so the sum has to be two NaNs.

A sublayer boundary (`kernels/boundary_check.py`) mixes such sums with whole numbers too: what all of them become is
exact in FP32, so that the rounding to bf16 is the only one.

Functions are written like those of `oracle.py`: with operators alone, `u32` being the type of a word.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from nvcomm.mailbox import ESCAPE
from stress import oracle

Way = Literal["gather", "ll", "two_shot", "scatter", "mhc_ll", "mhc_two_shot"]

# Operation of a run -> the collectives its replays are made of.
WAYS: dict[str, tuple[Way, ...]] = {
    "all_gather": ("gather",),
    "all_reduce": ("ll", "two_shot"),
    "all_reduce_mhc": ("mhc_ll", "mhc_two_shot"),
    "mixed": ("gather", "ll", "mhc_two_shot", "two_shot", "scatter", "mhc_ll"),
}

HALF = 0x1F001F  # the bits of a word that make its two numbers
# Every number of a sum, as bf16: the upper half of an FP32.
_NUMBERS = frozenset(
    struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in range((HALF & 0xFFFF) * oracle.MAX_RANKS + 1)
)
COMMON = 3  # stands for the gather in the key of what all ranks share: gathers proper are 0 to 2
# Streams of a boundary, and where the factors' indices begin, above those of all residual streams.
STREAMS = 4
POST, COMB, PRE = 1 << 24, 2 << 24, 3 << 24
EPS = 1e-6
# A boundary's rows grow by one with so many words of the plan's size, from 1 row on.
WORDS_A_ROW = 512
PLAIN_ROWS = 3  # of 4 rows of a boundary: without reserved words, whose NaNs would hide the norm of the whole row


def way_of(op: str, gather: int, words: int) -> Way:
    """The collective that stands for a gather of `words` words in a run of `op`: the same on every rank."""
    ways = WAYS[op]
    return ways[(gather + words // 4) % len(ways)]


def missing(op: str, sizes: Iterable[Sequence[int]]) -> tuple[Way, ...]:
    """The collectives of an operation that replays of these sizes do not hold."""
    held = {way_of(op, gather, words) for one in sizes for gather, words in enumerate(one)}
    return tuple(way for way in WAYS[op] if way not in held)


def is_boundary(way: Way) -> bool:
    """Whether a collective is a sublayer boundary."""
    return way.startswith("mhc")


def rows_of(words: int, max_rows: int) -> int:
    """Rows of the boundary that stands for a gather of `words` words."""
    return min(1 + words // WORDS_A_ROW, max_rows)


def part_of(words: int, rank: int, ranks: int) -> tuple[int, int]:
    """The words that a rank owns of a reduce-scatter, as `torch.tensor_split` has it."""
    each, more = divmod(words, ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def is_reserved(word: Any, u32: oracle.U32) -> Any:
    """1 where a payload word may not travel as it is, else 0."""
    return u32((word | u32(1)) == u32(ESCAPE))


def numbers(word: Any, u32: oracle.U32) -> Any:
    """The two numbers of a payload word, one in each half; 0 for a word that may not travel."""
    return (word & u32(HALF)) * (u32(1) - is_reserved(word, u32))


def is_addend(word: int) -> bool:
    """Whether a word may have been sent for a sum, as a rank's numbers or as their sum: one in 70,000 of all words."""
    return all((word >> shift) & 0xFFFF in _NUMBERS for shift in (0, 16))


def total(words: Sequence[Any], u32: oracle.U32) -> tuple[Any, Any]:
    """The two sums of the ranks' payload words, and whether they have to be NaN (1 or 0)."""
    sums, lost = u32(0), u32(0)
    for word in words:
        sums = sums + numbers(word, u32)
        lost = lost | is_reserved(word, u32)
    return sums, lost


def common_key(seed_key: Any, gather: Any, replay: Any, u32: oracle.U32) -> Any:
    """The key of what all ranks share in a boundary: residual streams and factors."""
    return oracle.key(seed_key, gather, u32(COMMON), replay, u32)


def small(key: Any, index: Any, bits: int, u32: oracle.U32) -> Any:
    """A whole number of so many bits: a factor."""
    return oracle.payload(key, index, u32(0), u32) & u32((1 << bits) - 1)


def reserved_in(row: Any, reserved: Any, u32: oracle.U32) -> Any:
    """How many words of 65,536 of a boundary's row may not travel as they are: none in most rows."""
    return reserved * u32((row & u32(PLAIN_ROWS)) == u32(PLAIN_ROWS))
