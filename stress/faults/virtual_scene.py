# SPDX-License-Identifier: Apache-2.0
"""What a fault of a virtual world happens to: its ranks, their tensors, and graphs of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nvcomm.communicator import Communicator
from nvcomm.errors import NvcommError
from nvcomm.virtual import VirtualWorld
from stress.faults.common import EVERY_RANK

TIMEOUT_S = 0.5


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
