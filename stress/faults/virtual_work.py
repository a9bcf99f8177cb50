# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a virtual world do in a fault: one process launches for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from nvcomm.communicator import Communicator
from stress.faults.common import EVERY_RANK
from stress.faults.table import ODD_RANK, RANKS
from stress.faults.virtual_scene import TIMEOUT_S, Scene

# Again and again: a signal that comes before the stop is lost.
CONTINUES = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
while True:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.5)
"""

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
