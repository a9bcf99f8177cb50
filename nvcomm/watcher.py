# SPDX-License-Identifier: Apache-2.0
"""A thread that tells a server what broke its communicator (docs/mailbox.md R10).

A server that only replays graphs calls nothing of ours that could raise. The watcher looks for it: on a GPU at a record
in pinned host memory that a kernel writes when it gives up, which costs no CUDA call while all is well.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, Self

from nvcomm.errors import NvcommError, UsageError

log = logging.getLogger("nvcomm.watcher")
DEFAULT_INTERVAL_S = 0.1


class _Engine(Protocol):
    def fault(self) -> NvcommError | None: ...


class Watched(Protocol):
    """A communicator, as far as it is watched."""

    @property
    def engine(self) -> _Engine: ...


class Watcher:
    """Calls `on_fault(error)` from a thread of its own, once for each time that the communicator breaks.

    After `reset()` it watches on; it ends with its block, or with the communicator. `on_fault` should tell the program,
    and leave `reset()` and `close()` to the thread that makes the calls. What it raises is logged.

    Args:
        comm: what is watched.
        on_fault: called with what `comm.check()` would raise.
        interval_s: between two looks. The second one reports: the other ranks' reports, which tell who is at the root,
            may be a moment behind the own one.

    Example:
        >>> with comm.watch(lambda error: stop_serving(error)):
        ...     serve()
    """

    def __init__(
        self, comm: Watched, on_fault: Callable[[NvcommError], object], interval_s: float = DEFAULT_INTERVAL_S
    ) -> None:
        if not isinstance(interval_s, int | float) or not 0 < interval_s < threading.TIMEOUT_MAX:
            raise UsageError(f"interval_s is {interval_s!r}; wanted seconds above 0.")
        if not callable(on_fault):
            raise UsageError(f"on_fault is {on_fault!r}; wanted what can be called with the error.")
        _ = comm.engine  # raises where it is closed: there would be nothing to watch
        self._comm = comm
        self._on_fault = on_fault
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvcomm-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; called from inside `on_fault`, once that returns."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        seen: object = None
        reported: object = None
        while not self._stop.wait(self._interval_s):
            try:
                error = self._comm.engine.fault()
            except UsageError:  # closed
                return
            mark = None if error is None else (type(error), getattr(error, "generation", None))
            if error is not None and mark == seen and mark != reported:
                reported = mark
                self._report(error)
            if mark is None:
                reported = None
            seen = mark

    def _report(self, error: NvcommError) -> None:
        try:
            self._on_fault(error)
        except Exception:
            log.exception("on_fault raised")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
