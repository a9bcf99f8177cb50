# SPDX-License-Identifier: Apache-2.0
"""One rank of a replay on a GPU: its buffers, its ledger, and the plan's graphs captured on its stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from nvcomm.jit import CompiledKernel
from nvcomm.mailbox import WORD_BYTES
from stress import ledger, oracle
from stress.decode import BadWord, Origin, decode
from stress.graph_steps import NOTHING, CollectiveStep, LateStep, TurnStep, steps_of
from stress.graphs import Graph
from stress.kernels.kernel import RankHandle, load, num_ctas
from stress.kernels.late import Late, LateKernel
from stress.kernels.turn import Turn, TurnKernel
from stress.plan import GraphSpec, Plan


class Gatherer(Protocol):
    """What a rank needs of a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def prepare(self, op: Any, dtype: torch.dtype) -> None: ...

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None, *, protocol: Any = ...) -> torch.Tensor: ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def mhc(self, hidden: int, *, num_streams: int = ...) -> Any: ...

    def serving(self) -> contextlib.AbstractContextManager[None]: ...


class GpuRank:
    """One rank.

    Args:
        comm: its communicator.
        plan: what will be replayed.
        device: the rank's GPU.
        stream: the rank's stream.
    """

    def __init__(self, comm: Gatherer, plan: Plan, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.comm = comm
        self.stream = stream
        self._plan = plan
        self._x_words = _aligned(plan.max_words)
        self._out_words = _aligned(plan.max_words * comm.world_size)
        self.x = torch.zeros((oracle.GATHERS_PER_REPLAY, self._x_words), dtype=torch.int32, device=device)
        self.out = torch.zeros((oracle.GATHERS_PER_REPLAY, self._out_words), dtype=torch.int32, device=device)
        self.ledger = torch.zeros(ledger.LEDGER_WORDS, dtype=torch.int32, device=device)
        self._snapshot = torch.zeros(ledger.LEDGER_WORDS, dtype=torch.int32, pin_memory=True)
        self.handle = RankHandle(
            x=self.x.data_ptr(),
            x_stride=self._x_words * WORD_BYTES,
            out=self.out.data_ptr(),
            out_stride=self._out_words * WORD_BYTES,
            ledger=self.ledger.data_ptr(),
            seed_key=plan.seed_key,
            reserved=plan.config.reserved_per_65536,
            rank=comm.rank,
        )
        self._turn = load(TurnKernel(comm.world_size))
        self._late = load(LateKernel())
        self._graphs: list[Graph] = []

    def load(self) -> None:
        """Runs the turn and the late kernel once, on nothing: their first launches wait for the device."""
        with torch.cuda.stream(self.stream):
            self._launch_turn(TurnStep(NOTHING, NOTHING, 0, 1, 0))
            self._launch(self._late, Late(1), 1)
        self.stream.synchronize()
        self.ledger.zero_()
        torch.cuda.synchronize()

    def capture(self, graphs: Sequence[GraphSpec]) -> list[Callable[[], None]]:
        """Captures and uploads the graphs; returns a launcher for each."""
        captured = [Graph(self.stream, functools.partial(self._serve, spec)) for spec in graphs]
        self._graphs += captured
        return [graph.launcher() for graph in captured]

    def snapshot(self) -> None:
        """Begins to copy the ledger to the host, on the current stream."""
        self._snapshot.copy_(self.ledger, non_blocking=True)

    def reading(self) -> ledger.LedgerReading:
        """The ledger as of the last `snapshot` that has ended."""
        return ledger.read(self._snapshot.numpy().view(np.uint32).tolist())

    def first_bad(self) -> BadWord | None:
        """The first wrong word that the last `snapshot` holds, explained."""
        first = self.reading().first
        if first is None:
            return None
        expected = Origin(first.src_rank, first.gather, first.replay, first.index)
        return decode(self._plan.oracle, self.comm.rank, expected, first.seen, self._plan.row_words)

    def close(self) -> None:
        """Destroys the graphs; none may be running."""
        graphs, self._graphs = self._graphs, []
        for graph in graphs:
            graph.close()

    def _serve(self, spec: GraphSpec) -> None:
        """One agent delivers for the whole launch, where the transport has one: copies outlive their gathers."""
        with self.comm.serving():
            self._body(spec)

    def _body(self, spec: GraphSpec) -> None:
        """Launches everything that one launch of a graph does."""
        for step in steps_of(spec, self.comm.rank):
            match step:
                case TurnStep():
                    self._launch_turn(step)
                case LateStep():
                    self._launch(self._late, Late(step.cell), 1)
                case CollectiveStep():
                    self._collect(step)

    def _collect(self, step: CollectiveStep) -> None:
        x = self.x[step.gather, : step.words]
        out = self.out[step.gather, : step.words * self.comm.world_size].view(self.comm.world_size, step.words)
        self.comm.all_gather(x, out=out)

    def _launch_turn(self, turn: TurnStep) -> None:
        work = Turn(turn.check, turn.fill, turn.cell_in, turn.cell_out, turn.step)
        self._launch(self._turn, work, num_ctas(max(*turn.check, *turn.fill)))

    def _launch(self, kernel: CompiledKernel, work: tuple[Any, ...], ctas: int) -> None:
        """Launches a kernel of the harness on the rank's stream."""
        kernel(work, self.handle, ctas, self.stream.cuda_stream)


def _aligned(words: int) -> int:
    """Rounded up to 128 bytes: every buffer starts at a multiple of 16, whatever the sizes."""
    return -(-words // 32) * 32
