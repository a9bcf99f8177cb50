# SPDX-License-Identifier: Apache-2.0
"""One call's waiting: poll and yield, then sleep ever longer, and never beyond the deadline (docs/mailbox.md R10)."""

from __future__ import annotations

import os
import time

# A yield gives the interpreter lock away too, which a rank that is a thread beside us needs. Ranks that run at once
# meet within tens of microseconds, which a sleep could not resolve: the kernel adds 50 us to each. Who is later than
# this is waited for asleep, and the processor is left to him.
SPIN_S = 5e-4
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 2e-5, 1e-3


class Waiting:
    """How long a call has been waiting.

    Args:
        timeout_s: bound, counted from the call's own first failed poll; infinity waits for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started = 0.0
        self._quiet_since = 0.0
        self._sleep_s = _FIRST_SLEEP_S
        self._long = False

    def pause(self) -> bool:
        """After a poll that brought nothing: gives way for a moment. False once the time is up."""
        now = time.monotonic()
        self._started = self._started or now
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since < min(SPIN_S, self._timeout_s):
            os.sched_yield()
            return True
        self._long = True
        if self.waited_s >= self._timeout_s:
            return False
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        return True

    def progress(self) -> None:
        """Something arrived: polls fast again. The deadline stays."""
        self._quiet_since = 0.0
        self._sleep_s = _FIRST_SLEEP_S
        self._long = False

    @property
    def is_long(self) -> bool:
        """Whether nothing has arrived for so long that the wait is noted in the statistics."""
        return self._long

    @property
    def waited_s(self) -> float:
        """Seconds since the first failed poll of the call."""
        return time.monotonic() - self._started if self._started else 0.0
