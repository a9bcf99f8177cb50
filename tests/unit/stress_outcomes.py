# SPDX-License-Identifier: Apache-2.0
"""What stress runs may have seen: right ones, wrong ones, and a control that failed as it must."""

from __future__ import annotations

from dataclasses import replace

from stress.control import Control
from stress.decode import BadWord, Origin
from stress.hang import Wait
from stress.run import Outcome, RunConfig

CONFIG = RunConfig("host", "peer", "mailbox", "all_gather", 4, 1, 10, None, 1.0)
STALE = BadWord(1, Origin(0, 1, 9, 5), 0x11111111, 0x22222222, "stale", Origin(2, 0, 8, 7))
FILLED = BadWord(1, Origin(0, 1, 9, 5), 0x11111111, 0xFFFFFFFF, "filled", None)
GOOD = Outcome(replays=10, gathers=30, bad_words=0, first_bad=None, seconds=1.0)
WRONG = Outcome(replays=10, gathers=30, bad_words=4, first_bad=STALE, seconds=1.0)
CONTROL = Control(WRONG)
WAIT = Wait(0, 2, 7, 1, 0, 1.5, 2)


def outcome(**changes) -> Outcome:
    """The good one, changed."""
    return replace(GOOD, **changes)
