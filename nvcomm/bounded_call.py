# SPDX-License-Identifier: Apache-2.0
"""A call into somebody else's code that may never return, with a deadline for whoever waits for it.

It runs on a daemon thread. Past the deadline the caller goes on; the thread cannot be stopped, only left behind, and
what it holds stays alive. A daemon thread does not keep the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """`call()` on a thread of its own, which starts now.

    Args:
        call: what may not return. It is not told of the deadline.
        name: of the thread, for whoever looks at a process that stands still.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether the call has ended, waiting up to `timeout_s` for it."""
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def result(self) -> T:
        """What the call returned; raises what it raised. Once, and only after it has ended."""
        if self._error is not None:
            error, self._error = self._error, None  # its traceback refers to this frame: no cycle through `self`
            try:
                raise error
            finally:
                del error
        return self._results.pop()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._results.append(call())
        except BaseException as error:  # raised where it is waited for
            self._error = error
