# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps GPUs fed: launches graphs in the plan's order and waits only when enough is queued."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence

import torch

from stress.gpu_rank import GpuRank
from stress.plan import Plan
from stress.run import Progress, RunConfig
from stress.watchdog import Watchdog

# Launches between two events, and events that may be outstanding: enough work is queued to hide the host, and a hang
# shows after a bounded number of launches.
CHUNK_LAUNCHES = 32
CHUNKS_IN_FLIGHT = 8
# Chunks between two looks at ledgers, faults and the clock. Counted, not timed: all processes of a peer world look at
# the same places, where they agree on whether to go on.
CHUNKS_PER_LOOK = 16
POLL_S = 2e-4


class Driver:
    """Replays a plan on the ranks of this process.

    Args:
        ranks: this process's ranks.
        plan: what to replay.
        watchdog: is told of every finished chunk.
        look: called between chunks: raises what the devices recorded, and agrees with the other processes; takes
            whether this process wants to stop, returns whether all do.
    """

    def __init__(self, ranks: Sequence[GpuRank], plan: Plan, watchdog: Watchdog, look: Callable[[bool], bool]) -> None:
        self._ranks = ranks
        self._plan = plan
        self._watchdog = watchdog
        self._look = look
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._in_flight: collections.deque[list[torch.cuda.Event]] = collections.deque()

    def run(self, config: RunConfig, progress: Progress) -> tuple[int, float]:
        """Replays until a bound of `config` is reached; returns launches and seconds."""
        launchers = list(zip(*(rank.capture(self._plan.graphs) for rank in self._ranks), strict=True))
        torch.cuda.synchronize()
        chunks_per_look = 1 if config.stop_on_bad else CHUNKS_PER_LOOK
        per_graph = self._plan.config.replays_per_graph
        wanted = -(-config.replay_limit // per_graph)
        started = time.monotonic()
        launches = chunks = 0
        while launches < wanted:
            count = min(CHUNK_LAUNCHES, wanted - launches)
            for graph in self._plan.order(launches, count).tolist():
                for launch in launchers[graph]:
                    launch()
            launches += count
            chunks += 1
            self._throttle(CHUNKS_IN_FLIGHT)
            if chunks % chunks_per_look == 0:
                bad_words = self._read_ledgers()
                progress.show(sum(rank.reading().replay for rank in self._ranks) // len(self._ranks), bad_words)
                over = config.duration_s is not None and time.monotonic() - started > config.duration_s
                self._watchdog.beat()
                if self._look(over or (config.stop_on_bad and bad_words > 0)):
                    break
        self._throttle(0)
        return launches, time.monotonic() - started

    def _throttle(self, limit: int) -> None:
        """Marks the end of a chunk, then waits until at most `limit` chunks are outstanding."""
        events = []
        for rank in self._ranks:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(rank.stream)
            events.append(event)
        self._in_flight.append(events)
        while len(self._in_flight) > limit:
            self._wait(self._in_flight[0])
            self._in_flight.popleft()
            self._watchdog.beat()

    def _read_ledgers(self) -> int:
        """Copies the ledgers beside the replays; returns the wrong words so far."""
        with torch.cuda.stream(self._side):
            for rank in self._ranks:
                rank.snapshot()
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._side)
        self._wait([copied])
        return sum(rank.reading().bad_words for rank in self._ranks)

    def _wait(self, events: list[torch.cuda.Event]) -> None:
        """Polls: the process stays able to end, whatever the device does."""
        while not all(event.query() for event in events):  # type: ignore[no-untyped-call]
            time.sleep(POLL_S)
