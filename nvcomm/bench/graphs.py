# SPDX-License-Identifier: Apache-2.0
"""Timing inside CUDA graphs: `plan.iters` back-to-back calls a graph, one sample a replay, no pause between replays.

Replays are enqueued ahead of the device, the warm-up before them, so ranks that were launched one after the other are
in step when the first sample begins: each call waits for all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from nvcomm.bench.case import Case
from nvcomm.bench.plan import DEFAULT_RANKS, Plan
from nvcomm.bench.rank import TURNS, cases_of, max_bytes_of, options_of
from nvcomm.bench.result import Result
from nvcomm.communicator import Communicator
from nvcomm.errors import UnsupportedError
from nvcomm.virtual import VirtualWorld


class Recording:
    """A graph of one rank, and the events around each of its replays."""

    def __init__(self, call: Callable[[], object], calls: int, stream: torch.cuda.Stream) -> None:
        self._calls = calls
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread may touch the device while we capture.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self, *, timed: bool) -> None:
        """Enqueues one replay; does not wait."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            start.record()
            self._graph.replay()
            end.record()
        if timed:
            self._events.append((start, end))

    def times_us(self) -> list[float]:
        """Time of a call in each timed replay; the device has to be done."""
        return [start.elapsed_time(end) * 1e3 / self._calls for start, end in self._events]


def times_of(plan: Plan, recordings: Sequence[Recording]) -> list[float]:
    """Replays the graphs of all ranks of this process together; the slowest rank counts."""
    for replay in range(plan.warmup_iters + plan.cudagraph):
        for recording in recordings:
            recording.replay(timed=replay >= plan.warmup_iters)
    torch.cuda.synchronize()
    return [max(times) for times in zip(*(recording.times_us() for recording in recordings), strict=True)]


def graph_times(plan: Plan, call: Callable[[], object]) -> list[float]:
    """Of this process's rank, in microseconds a call."""
    call()  # outside of the capture: loads what has to be loaded
    torch.cuda.synchronize()
    return times_of(plan, [Recording(call, plan.iters, torch.cuda.Stream())])


class _VirtualCase:
    """One size in a virtual world: every rank's input and output, on the GPU."""

    def __init__(self, world: VirtualWorld, case: Case) -> None:
        self._world, self._case = world, case
        self._xs = [case.input(rank, 0).to(world.device) for rank in range(len(world))]
        self._outs = [case.output(world.device) for _ in range(len(world))]

    def check(self, turns: Sequence[int]) -> int:
        """Wrong elements over all ranks, in turns of other data each."""
        wrong = 0
        for turn in turns:
            for rank, x in enumerate(self._xs):
                x.copy_(self._case.input(rank, turn))
            getattr(self._world, self._case.op)(self._xs, self._outs)
            wrong += self.left_wrong(turn)
        return wrong

    def left_wrong(self, turn: int) -> int:
        """Wrong elements of what the outputs hold, if the inputs are those of `turn`."""
        torch.cuda.synchronize()
        return sum(self._case.count_wrong(out, rank, turn) for rank, out in enumerate(self._outs))

    def times(self, plan: Plan) -> list[float]:
        """One sample a replay; afterwards the outputs hold what the last replay wrote."""
        op = self._case.op
        for out in self._outs:
            out.zero_()

        def call(comm: Communicator) -> None:
            getattr(comm, op)(self._xs[comm.rank], self._outs[comm.rank])

        recordings = [
            Recording(functools.partial(call, comm), plan.iters, self._world.stream(comm.rank)) for comm in self._world
        ]
        samples = times_of(plan, recordings)
        for comm in self._world:
            comm.check()
        return samples


def measure_virtual(plan: Plan) -> Iterator[Result]:
    """All ranks on this GPU, row by row.

    Raises:
        UnsupportedError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("the virtual world needs a CUDA GPU, and torch sees none: `nvcomm doctor` says why.")
    world_size = plan.ranks or DEFAULT_RANKS
    cases = cases_of(plan, world_size)
    with VirtualWorld(world_size, "cuda", max_bytes=max_bytes_of(cases), **options_of(plan)) as world:
        if plan.reduce_op is not None:
            world.prepare(plan.reduce_op, cases[0].dtype)
        for case in cases:
            here = _VirtualCase(world, case)
            wrong = here.check(range(1, TURNS + 1)) if plan.check else None
            samples = [] if wrong else here.times(plan)
            if plan.check and not wrong:
                wrong = here.left_wrong(TURNS) + here.check([TURNS + 1])
            yield Result(case, "nvcomm", samples, wrong)
