# SPDX-License-Identifier: Apache-2.0
"""Timing of collectives in a virtual world: back-to-back calls inside CUDA graphs, one graph a rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import nvcomm


def capture(call: Callable[[], object], calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """`calls` back-to-back calls on `stream`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def median_us(replay: Callable[[], None], calls: int, trials: int = 15, replays: int = 8) -> float:
    """Median over trials of the time of one call; a trial is `replays` graphs of `calls` calls, back to back."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(trials):
        start = time.perf_counter()
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / replays / calls * 1e6)
    return statistics.median(samples)


class RankGraphs:
    """`calls` back-to-back calls of every rank, captured on the rank's own stream."""

    def __init__(
        self, world: nvcomm.virtual.VirtualWorld, call: Callable[[nvcomm.Communicator], object], calls: int
    ) -> None:
        self.calls = calls
        self._streams = [world.stream(rank) for rank in range(len(world))]
        self._graphs = [
            capture(lambda comm=comm: call(comm), calls, stream)
            for comm, stream in zip(world, self._streams, strict=True)
        ]

    def replay(self) -> None:
        """Launches every rank's graph; does not wait."""
        for graph, stream in zip(self._graphs, self._streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    def median_us(self) -> float:
        """See the function of that name."""
        return median_us(self.replay, self.calls)
