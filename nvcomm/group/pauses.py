# SPDX-License-Identifier: Apache-2.0
"""How often a rank that waits for others looks again: after 0.1 ms, then ever more rarely, every 10 ms at last."""

from __future__ import annotations

from collections.abc import Iterator

_FIRST_S, _LONGEST_S = 1e-4, 1e-2


def pauses() -> Iterator[float]:
    """Seconds between two looks, without end. Ranks mostly arrive together, or seconds apart."""
    pause = _FIRST_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_S)
