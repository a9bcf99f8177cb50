# SPDX-License-Identifier: Apache-2.0
"""A thread that ends the process when a run makes no progress: the last resort behind the device's own timeouts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Self

from stress.hang import Hang

# Longer than a rank's own timeout, so that the rank's report, which knows more, comes first.
GRACE_S = 5.0
EXIT_HANG = 124


class Watchdog:
    """Calls `on_hang` and ends the process when `beat` was not called for `limit_s`.

    The main thread may be stuck inside a driver call, so nothing but ending the process is left to do then.

    Args:
        limit_s: seconds without a beat.
        explain: (reason) -> everything that can be found out without the main thread.
        on_hang: writes the report; returns the exit code.
        end: ends the process (a stand-in in tests).
    """

    def __init__(
        self,
        limit_s: float,
        explain: Callable[[str], Hang],
        on_hang: Callable[[Hang], int],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._limit_s = limit_s
        self._explain = explain
        self._on_hang = on_hang
        self._end = end
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stress-watchdog", daemon=True)

    def beat(self) -> None:
        """Something got done."""
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(0.5, self._limit_s / 10)):
            silence = time.monotonic() - self._last
            if silence > self._limit_s:
                code = EXIT_HANG
                try:
                    code = self._on_hang(self._explain(f"no progress for {silence:.1f} s"))
                finally:
                    self._end(code)
                return
