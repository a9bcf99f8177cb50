# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def together(works: Sequence[Callable[[], Any]], limit_s: float = 120.0) -> list[Any]:
    """Calls each on a thread of its own, all at once; element i is its result, or the exception that it raised."""
    results: list[Any] = [None] * len(works)

    def one(i: int) -> None:
        try:
            results[i] = works[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "a rank hangs"
    return results
