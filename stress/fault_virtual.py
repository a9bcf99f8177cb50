# SPDX-License-Identifier: Apache-2.0
"""The faults of a virtual world: all ranks on one GPU, their graphs and streams driven by one process.

That process cannot lose a rank, but it can forget to launch one, and it can be stopped between two launches while the
GPU goes on: the kernels of the other ranks wait as they would for another machine.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import torch

import nvcomm
from nvcomm.communicator import Communicator
from nvcomm.errors import NvcommError
from nvcomm.virtual import VirtualWorld
from stress.fault_common import ANYTHING, EVERY_RANK, GOES_ON, MISMATCH, TIMED_OUT, WORDS, disagreements, wraps
from stress.fault_table import (
    AS_BEFORE,
    CALLS_BEFORE,
    MORE_WORDS,
    ODD_RANK,
    RANKS,
    RESET,
    Fault,
    Row,
    Sight,
    row_of,
    sight_of,
)

TIMEOUT_S = 0.5
# Again and again: a signal that comes before the stop is lost.
CONTINUES = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
while True:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.5)
"""


@dataclass(slots=True)
class Scene:
    """A world with a fault about to happen.

    Attributes:
        world: the ranks.
        xs, outs: rank r's tensors at index r, `WORDS` words each.
        floats: two tensors to sum from and into; the kernels for it are loaded.
        reported: what watchers were told, by rank.
        kept: what has to live until the GPU is done with it.
    """

    world: VirtualWorld
    xs: list[torch.Tensor]
    outs: list[torch.Tensor]
    floats: tuple[torch.Tensor, torch.Tensor]
    reported: dict[int, NvcommError] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def gather(self, ranks: Sequence[int] = EVERY_RANK) -> None:
        """One gather of some ranks, each on its own stream and behind nobody else's."""
        for rank in ranks:
            with torch.cuda.stream(self.world.stream(rank)):
                self.one(self.world[rank])

    def one(self, comm: Communicator) -> None:
        """One gather of one rank on the current stream."""
        comm.all_gather(self.xs[comm.rank], self.outs[comm.rank])

    def capture(self, rank: int, calls: int = 1, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
        """A graph of gathers of one rank."""
        comm = self.world[rank]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream or comm.stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                self.one(comm)
        self.kept.append(graph)
        return graph

    def replay(self, graphs: dict[int, torch.cuda.CUDAGraph]) -> None:
        """Replays a graph of each rank on its stream."""
        for rank, graph in graphs.items():
            with torch.cuda.stream(self.world.stream(rank)):
                graph.replay()


Work = Callable[[Scene], None]


def never_arrives(scene: Scene) -> None:
    scene.gather((0, 1))


def one_call_fewer(scene: Scene) -> None:
    for call in range(3):
        scene.gather((0, 1) if call == 1 else EVERY_RANK)


def raises_between_calls(scene: Scene) -> None:
    """The exception leaves the loop over the ranks, as it would leave a server's step."""

    def call(comm: Communicator) -> None:
        if comm.rank == ODD_RANK:
            raise ArithmeticError("raised between two calls")
        scene.one(comm)

    try:
        scene.world.run(call)
    except ArithmeticError:
        return
    raise AssertionError("the program's own exception was swallowed")


def other_tensor(x: torch.Tensor) -> Work:
    """The odd rank gathers `x`."""

    def work(scene: Scene) -> None:
        scene.xs[ODD_RANK] = x.cuda()
        scene.outs[ODD_RANK] = torch.zeros((RANKS, *x.shape), dtype=x.dtype, device="cuda")
        torch.cuda.synchronize()
        scene.gather()

    return work


def other_operation(scene: Scene) -> None:
    scene.gather((0, 1))
    with torch.cuda.stream(scene.world.stream(ODD_RANK)):
        scene.world[ODD_RANK].all_reduce(*scene.floats)


def stopped_for(seconds: float) -> Work:
    """The process stops itself between the launches of two ranks; a helper lets it go on."""

    def work(scene: Scene) -> None:
        scene.gather((0, 1))
        with subprocess.Popen([sys.executable, "-S", "-c", CONTINUES, str(os.getpid()), str(seconds)]) as helper:
            os.kill(os.getpid(), signal.SIGSTOP)
            scene.gather((ODD_RANK,))
            helper.kill()

    return work


def overlapping_streams(scene: Scene) -> None:
    """Eager calls from two streams: an event of ours puts one behind the other."""
    for comm in scene.world:
        for stream in [torch.cuda.Stream() for _ in range(3)]:
            scene.kept.append(stream)
            with torch.cuda.stream(stream):
                scene.one(comm)


def overlapping_graphs(scene: Scene) -> None:
    """Two graphs of rank 0 run at once: the first waits for ranks that come later."""
    graphs = [scene.capture(0, stream=torch.cuda.Stream()) for _ in range(2)]
    for graph in graphs:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
    time.sleep(0.05)
    scene.gather((1, ODD_RANK))
    scene.gather((1, ODD_RANK))


def captured_again(scene: Scene) -> None:
    """Graphs are destroyed while their last replay is under way, and captured again with another number of calls."""
    for calls in (1, 3, 2):
        graphs = {rank: scene.capture(rank, calls) for rank in EVERY_RANK}
        for _ in range(5):
            scene.replay(graphs)
        for graph in graphs.values():
            graph.reset()
        scene.kept.clear()


def graphs_without_a_rank(scene: Scene) -> None:
    """Nothing but replays: nobody would know, if no watcher looked."""
    scene.replay({rank: scene.capture(rank) for rank in (0, 1)})
    deadline = time.monotonic() + TIMEOUT_S + 1
    while len(scene.reported) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)


def right_calls(scene: Scene) -> None:
    for _ in range(5):
        scene.gather()


FAULTS: tuple[Fault[Work], ...] = (
    Fault("never arrives", TIMED_OUT, never_arrives),
    Fault("makes one call fewer", replace(TIMED_OUT, places=((CALLS_BEFORE + 2, 1),)), one_call_fewer),
    Fault("raises between two calls", TIMED_OUT, raises_between_calls),
    Fault("is stopped (SIGSTOP) and continued in time", GOES_ON, stopped_for(TIMEOUT_S / 4), EVERY_RANK),
    Fault("is stopped (SIGSTOP) for longer than the timeout", TIMED_OUT, stopped_for(TIMEOUT_S * 1.5)),
    *disagreements(other_tensor, other_operation),
    Fault("calls from two streams at once", GOES_ON, overlapping_streams, EVERY_RANK),
    Fault(
        "replays two graphs at once, device checks on",
        MISMATCH, overlapping_graphs, (0,), device_checks=True,
    ),
    Fault("replays two graphs at once, device checks off", ANYTHING, overlapping_graphs, (0,)),
    Fault("destroys its graph under way and captures again", GOES_ON, captured_again, EVERY_RANK),
    Fault("only replays graphs, and another rank never arrives", TIMED_OUT, graphs_without_a_rank),
    *wraps(right_calls, never_arrives),
)  # fmt: skip


def run(fault: Fault[Work]) -> Row:
    """Runs one fault in a world of its own."""
    sights = [Sight() for _ in EVERY_RANK]
    checks = {"NVCOMM_DEVICE_CHECKS": str(int(fault.device_checks))}
    with (
        mock.patch.dict(os.environ, checks),
        nvcomm.virtual_world(RANKS, timeout_s=TIMEOUT_S, generation=fault.generation) as world,
    ):
        xs = [torch.full((WORDS,), 1 + rank, dtype=torch.int32, device="cuda") for rank in EVERY_RANK]
        outs = [torch.zeros((RANKS, WORDS), dtype=torch.int32, device="cuda") for _ in EVERY_RANK]
        floats = (torch.ones(WORDS, device="cuda"), torch.zeros(WORDS, device="cuda"))
        scene = Scene(world, xs, outs, floats)
        if fault.work is other_operation:  # a load waits for the device (R9)
            world.prepare("all_reduce", torch.float32)
        torch.cuda.synchronize()
        for _ in range(CALLS_BEFORE):
            scene.gather()
        torch.cuda.synchronize()
        watchers = [comm.watch(functools.partial(scene.reported.__setitem__, comm.rank), 0.01) for comm in world]
        started = time.perf_counter()
        try:
            fault.work(scene)
        except NvcommError as error:
            raise AssertionError(f"{fault.name}: the call itself raised {error}") from error
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        time.sleep(0.1)  # for the watchers
        for watcher in watchers:
            watcher.close()
        for rank, comm in enumerate(world):
            sights[rank] = sight_of(comm.engine.fault(), seconds)
            told = sight_of(scene.reported.get(rank), seconds)
            if told != sights[rank]:
                sights[rank] = replace(sights[rank], problem=f"its watcher was told {told}")
        then, problem = _go_on(world)
        for rank, sight in enumerate(sights):
            sights[rank] = replace(sight, then=then, problem="; ".join(filter(None, (sight.problem, problem))))
    return row_of(fault, sights, TIMEOUT_S)


def _go_on(world: VirtualWorld) -> tuple[str, str]:
    """Brings the ranks together if one is broken, compares `MORE_WORDS` words on each, audits; what was wrong."""
    if int(torch.ones(1000, device="cuda").sum()) != 1000:
        return "", "the CUDA context is unusable"
    audits = [comm.audit() for comm in world]
    broken = any(comm.engine.fault() for comm in world)
    apart = any(audit != audits[0] or audit.dirty_words for audit in audits)
    if broken or apart:
        world.reset()
    sizes = (4096, 60000, 1, 1 << 17)
    compared = call = wrong = 0
    while compared < MORE_WORDS:
        size = sizes[call % len(sizes)]
        index = torch.arange(size, device="cuda", dtype=torch.int32)
        xs = [index * 8 + rank + (call << 24) for rank in range(len(world))]
        want = torch.stack(xs)
        wrong += sum(int((y != want).sum()) for y in world.all_gather(xs))
        compared += want.numel()
        call += 1
    if wrong:
        return "", f"{wrong} wrong words afterwards"
    for comm in world:
        comm.check()
    audits = [comm.audit() for comm in world]
    if any(audit != audits[0] or audit.dirty_words for audit in audits):
        return "", f"mailboxes afterwards: {audits}"
    return (RESET if broken or apart else AS_BEFORE), ""
