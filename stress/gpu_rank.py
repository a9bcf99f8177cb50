# SPDX-License-Identifier: Apache-2.0
"""One rank of a replay on a GPU: its buffers, its ledger, and the plan's graphs captured on its stream.

A graph of K replays, whose gathers G0 G1 G2 follow each other with nothing between them:

    turn(fill 0) [late] G0 G1 G2 turn(check 0, fill 1) [late] G0 G1 G2 ... turn(check K - 1)

A *spaced* graph has a turn after every gather instead, which checks that gather and fills the next.
"""

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
from stress.graphs import Graph
from stress.kernels.kernel import RankHandle, load, num_ctas
from stress.kernels.late import Late, LateKernel
from stress.kernels.turn import Turn, TurnKernel
from stress.plan import GraphSpec, Plan, Sizes

NOTHING: Sizes = (0,) * oracle.GATHERS_PER_REPLAY


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
            self._launch_turn(NOTHING, NOTHING, 0, 1, step=0)
            self._launch_late(1)
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
        turns = _Turns(self._launch_turn)
        last = len(spec.replays) - 1
        first_fill = _only(spec.replays[0], 0) if spec.spaced else spec.replays[0]
        turns.add(NOTHING, first_fill, step=0)
        for number, sizes in enumerate(spec.replays):
            upcoming = spec.replays[number + 1] if number < last else NOTHING
            if spec.late_rank == self.comm.rank:
                self._launch_late(turns.cell)
            for gather, words in enumerate(sizes):
                self._gather(gather, words)
                is_last = gather == len(sizes) - 1
                if spec.spaced and not is_last:
                    turns.add(_only(sizes, gather), _only(sizes, gather + 1), step=0)
            check = _only(sizes, len(sizes) - 1) if spec.spaced else sizes
            fill = _only(upcoming, 0) if spec.spaced else upcoming
            turns.add(check, fill, step=1, ends=number == last)

    def _gather(self, gather: int, words: int) -> None:
        x = self.x[gather, :words]
        out = self.out[gather, : words * self.comm.world_size].view(self.comm.world_size, words)
        self.comm.all_gather(x, out=out)

    def _launch_turn(self, check: Sizes, fill: Sizes, cell_in: int, cell_out: int, *, step: int) -> None:
        self._launch(self._turn, Turn(check, fill, cell_in, cell_out, step), num_ctas(max(*check, *fill)))

    def _launch_late(self, cell: int) -> None:
        self._launch(self._late, Late(cell), 1)

    def _launch(self, kernel: CompiledKernel, work: tuple[Any, ...], ctas: int) -> None:
        """Launches a kernel of the harness on the rank's stream."""
        kernel(work, self.handle, ctas, self.stream.cuda_stream)


class _Turns:
    """Numbers the turns of a graph: each reads the ledger cell that the one before it wrote."""

    def __init__(self, launch: Any) -> None:
        self._launch = launch
        self.cell = 0

    def add(self, check: Sizes, fill: Sizes, *, step: int, ends: bool = False) -> None:
        """Launches one turn; the last one of a graph leaves the count where the next launch looks for it."""
        cell_out = 0 if ends else self.cell + 1
        if cell_out >= ledger.NUM_CELLS:
            raise ValueError(f"a graph of more than {ledger.NUM_CELLS} turns does not fit the ledger")
        self._launch(check, fill, self.cell, cell_out, step=step)
        self.cell = cell_out


def _only(sizes: Sizes, gather: int) -> Sizes:
    """The sizes of one gather, nothing for the others."""
    return tuple(words if g == gather else 0 for g, words in enumerate(sizes))


def _aligned(words: int) -> int:
    """Rounded up to 128 bytes: every buffer starts at a multiple of 16, whatever the sizes."""
    return -(-words // 32) * 32
