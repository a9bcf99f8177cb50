# SPDX-License-Identifier: Apache-2.0
"""How a published word reaches a mailbox: by a store of the publishing thread, or late and in any order.

`DelayedTransport` exists for tests and stress. It promises no more than the hardware does: words reach each
destination, the sender's own mailbox included, after any delay and in any order; only what one rank stores to one
address stays in order. Races that need a rare moment then happen within seconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from typing import Protocol

from nvcomm.errors import NvcommError
from nvcomm.host.words import Words, store_words

# Most pieces arrive within some 0.1 ms, about what it takes to wake a thread; a few outlast whole calls.
_USUAL_DELAY_S, _LONG_DELAY_S, _LONG_DELAY_ODDS = 1e-4, 2e-3, 1 / 256
_MAX_PIECES = 4


class Transport(Protocol):
    """Delivers words into mailboxes."""

    def begin(self) -> None:
        """A new publish begins: its words may not arrive before older ones of the same lane."""

    def store(self, lane: int, target: Words, words: Words) -> None:
        """Delivers `words` into `target`, a view of a mailbox.

        Args:
            lane: the destination's row, as one number: stores of two publishes to one lane may share addresses.
            target: as long as `words`.
            words: may change after the call.
        """

    def drain(self, timeout_s: float) -> None:
        """Returns once everything has landed."""

    def close(self) -> None:
        """Lets everything land, then ends."""


class DirectTransport:
    """The calling thread stores; the words have landed when its next locked instruction has (docs/mailbox.md R1)."""

    def begin(self) -> None:
        """Nothing is ever on its way."""

    def store(self, lane: int, target: Words, words: Words) -> None:
        """See `Transport.store`."""
        store_words(target, words)

    def drain(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""


class DelayedTransport:
    """A thread delivers each copy in pieces, after seeded pseudo-random delays.

    Args:
        seed: of the delays; give every rank another one.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._outbox: list[tuple[float, int, Words, Words]] = []  # a heap by arrival time
        self._numbers = itertools.count()
        self._latest: dict[int, float] = {}  # lane -> arrival of its last piece
        self._floor: dict[int, float] = {}  # lane -> arrival of the last piece of earlier publishes
        self._changed = threading.Condition()
        self._delivering = False
        self._closed = False
        self._agent = threading.Thread(target=self._deliver, name=f"nvcomm-delayed-{seed}", daemon=True)
        self._agent.start()

    def begin(self) -> None:
        """See `Transport.begin`."""
        self._floor.update(self._latest)

    def store(self, lane: int, target: Words, words: Words) -> None:
        """See `Transport.store`."""
        pieces = self._random.randint(1, min(_MAX_PIECES, len(words)))
        cuts = sorted(self._random.sample(range(1, len(words)), pieces - 1))
        now = time.monotonic()
        with self._changed:
            first = self._outbox[0] if self._outbox else None
            for start, stop in itertools.pairwise([0, *cuts, len(words)]):
                arrival = max(now + self._delay(), self._floor.get(lane, 0.0))
                self._latest[lane] = max(arrival, self._latest.get(lane, 0.0))
                piece = (arrival, next(self._numbers), target[start:stop], words[start:stop].copy())
                heapq.heappush(self._outbox, piece)
            if self._outbox[0] is not first:  # else the agent's alarm is set already
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """See `Transport.drain`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._outbox and not self._delivering, timeout_s):
                raise NvcommError(f"the delayed transport still had {len(self._outbox)} stores after {timeout_s} s.")

    def close(self) -> None:
        """See `Transport.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._agent.join()

    def _delay(self) -> float:
        longest = _LONG_DELAY_S if self._random.random() < _LONG_DELAY_ODDS else _USUAL_DELAY_S
        return longest * self._random.random() ** 3

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._delivering = False
                if not self._outbox:
                    self._changed.notify_all()
                    if self._closed:
                        return
                    self._changed.wait()
                    continue
                left = self._outbox[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                _, _, target, words = heapq.heappop(self._outbox)
                self._delivering = True
            store_words(target, words)
