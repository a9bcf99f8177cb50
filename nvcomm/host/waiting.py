# SPDX-License-Identifier: Apache-2.0
"""One call's waiting: poll, then yield, then sleep ever longer, and never beyond the deadline (docs/mailbox.md R10)."""

from __future__ import annotations

import os
import time

# A yield gives the interpreter lock away too, which a rank that is a thread beside us needs. Ranks that run at once
# meet within a few polls; afterwards sleeping leaves the processor to the rank that is waited for.
YIELDS = 100
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 2e-5, 1e-3


class Waiting:
    """How long a call has been waiting.

    Args:
        timeout_s: bound, counted from the call's own first failed poll; infinity waits for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started = 0.0
        self._polls = 0
        self._sleep_s = _FIRST_SLEEP_S

    def pause(self) -> bool:
        """After a poll that brought nothing: gives way for a moment. False once the time is up."""
        self._polls += 1
        if self._polls <= YIELDS:
            if self._polls == 1 and self._started == 0.0:
                self._started = time.monotonic()
            os.sched_yield()
            return True
        if self.waited_s >= self._timeout_s:
            return False
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        return True

    def progress(self) -> None:
        """Something arrived: polls fast again. The deadline stays."""
        self._polls = 0
        self._sleep_s = _FIRST_SLEEP_S

    @property
    def is_long(self) -> bool:
        """Whether this wait is long enough to be noted in the statistics."""
        return self._polls > YIELDS

    @property
    def waited_s(self) -> float:
        """Seconds since the first failed poll of the call."""
        return time.monotonic() - self._started if self._started else 0.0
