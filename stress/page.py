# SPDX-License-Identifier: Apache-2.0
"""The status page of the host world: anonymous shared memory that each rank writes its own line of.

The parent reads it to show progress, to notice a hang, and to say in the end what happened. Nothing waits for it, and
nothing of it is left when the last process ends.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

import numpy as np
import numpy.typing as npt

TEXT_BYTES = 2048


class Field(IntEnum):
    """The 64-bit fields of a rank's line."""

    STATE = 0
    REPLAY = 1  # replays finished
    GATHER = 2  # gathers finished within the replay that is going on
    GATHERS = 3  # gathers checked
    BAD_WORDS = 4
    BAD_REPLAY = 5  # the first wrong word: where, and its bits
    BAD_GATHER = 6
    BAD_SRC_RANK = 7
    BAD_INDEX = 8
    BAD_SEEN = 9
    STARTED_NS = 10  # monotonic clock at the first and after the last replay
    ENDED_NS = 11
    WAIT_SRC_RANK = 12  # what a rank that gave up saw
    WAIT_GENERATION = 13
    WAIT_SLOT = 14
    WAIT_WORD = 15
    WAIT_US = 16
    WAIT_ROOT_RANK = 17
    STOP_AFTER = 18  # rank 0's line: the last replay of the run
    TEXT_LENGTH = 19


class State(IntEnum):
    """What a rank is at."""

    SETUP = 0
    RUNNING = 1
    DONE = 2
    TIMED_OUT = 3
    UNSUPPORTED = 4
    FAILED = 5
    ALONE = 6  # another rank did not come to where all meet, at the beginning or the end; the text says which


class StatusPage:
    """A line of 64-bit fields and a text for each rank. Build it before the ranks are forked."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        fields_bytes = 8 * len(Field) * ranks
        self._memory = mmap.mmap(-1, fields_bytes + TEXT_BYTES * ranks)
        words: npt.NDArray[np.int64] = np.frombuffer(self._memory, np.int64, count=len(Field) * ranks)
        self.lines = words.reshape(ranks, len(Field))
        self._texts = np.frombuffer(self._memory, np.uint8, offset=fields_bytes).reshape(ranks, TEXT_BYTES)
        self.lines[0, Field.STOP_AFTER] = np.iinfo(np.int64).max

    def line(self, rank: int) -> npt.NDArray[np.int64]:
        """A rank's fields, a view."""
        return self.lines[rank]

    def state(self, rank: int) -> State:
        """What a rank is at."""
        return State(int(self.lines[rank, Field.STATE]))

    def set_text(self, rank: int, text: str) -> None:
        """Leaves a text for the parent; cut at TEXT_BYTES."""
        data = text.encode(errors="replace")[:TEXT_BYTES]
        self._texts[rank, : len(data)] = np.frombuffer(data, np.uint8)
        self.lines[rank, Field.TEXT_LENGTH] = len(data)

    def text(self, rank: int) -> str:
        """What a rank left."""
        length = int(self.lines[rank, Field.TEXT_LENGTH])
        return self._texts[rank, :length].tobytes().decode(errors="replace")
