# SPDX-License-Identifier: Apache-2.0
"""One rank of a replay of sums on a GPU: its collectives are those of the run's operation, checked like gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nvcomm.jit import CompiledKernel
from stress import sum_oracle
from stress.boundary_tensors import HIDDEN, MAX_ROWS, BoundaryTensors
from stress.decode import BadWord, Origin
from stress.gpu_rank import Gatherer, GpuRank
from stress.graph_steps import NOTHING, CollectiveStep, TurnStep
from stress.kernels.boundary_check import BoundaryCheckKernel, BoundaryOutputs
from stress.kernels.boundary_fill import BoundaryFillKernel, BoundaryInputs
from stress.kernels.kernel import load, num_ctas
from stress.kernels.sum_turn import SumTurn, SumTurnKernel
from stress.plan import MAX_BYTES, Plan
from stress.sum_oracle import EPS, STREAMS, Way

MAX_CTAS = 64  # of the kernels around boundaries: a CTA takes a row
ROW_WORDS = HIDDEN // 2


class SumRank(GpuRank):
    """A rank whose collectives are those of `op`.

    Args:
        comm: its communicator, of at least MAX_BYTES.
        plan: what will be replayed.
        device: the rank's GPU.
        stream: the rank's stream.
        op: operation of the run.
    """

    def __init__(self, comm: Gatherer, plan: Plan, device: torch.device, stream: torch.cuda.Stream, op: str) -> None:
        super().__init__(comm, plan, device, stream)
        self._op = op
        self._max_rows = max(1, min(MAX_ROWS, min(plan.config.max_bytes, MAX_BYTES) // (HIDDEN * 2)))
        self._boundaries = [BoundaryTensors(self._max_rows, device) for _ in NOTHING] if self._has_boundaries else []
        self._weight = (1 + torch.arange(HIDDEN, device=device) % 8 / 8).bfloat16()
        self._scratch = torch.zeros(self._sum_words, dtype=torch.int32, device=device)
        self._sum_turn = load(SumTurnKernel(comm.world_size))
        self._fill = load(BoundaryFillKernel(HIDDEN))
        self._check = load(BoundaryCheckKernel(comm.world_size, HIDDEN, compare=True))
        self._mhc: Any = None

    @property
    def _sum_words(self) -> int:
        """Of the largest sum."""
        return max(self._x_words, self._max_rows * ROW_WORDS)

    @property
    def _has_boundaries(self) -> bool:
        return any(sum_oracle.is_boundary(way) for way in sum_oracle.WAYS[self._op])

    def load(self) -> None:
        """Loads the collectives' kernels and the checks', too."""
        self._load_collectives()
        self._launch(self._fill, BoundaryInputs(0, 0, 0, 0, 0, gather=0, rows=0, cell=0, step=0), 1)
        self._launch(self._check, BoundaryOutputs(0, 0, 0, 0, 0, gather=0, rows=0, cell=0), 1)
        self._launch(self._sum_turn, SumTurn(NOTHING, NOTHING, NOTHING, checked=0, cell=0, step=0), 1)
        super().load()

    def _load_collectives(self) -> None:
        for op in ("all_reduce", "reduce_scatter"):
            self.comm.prepare(op, torch.bfloat16)
        if self._has_boundaries:
            self._mhc = self.comm.mhc(HIDDEN, num_streams=STREAMS)

    def first_bad(self) -> BadWord | None:
        """A wrong word of a sum names what had to be there, but not where it came from: it holds 10 bits of origin."""
        first = self.reading().first
        if first is None:
            return None
        words = self._plan.row_words(first.gather, first.replay)
        way = sum_oracle.way_of(self._op, first.gather, words)
        if way == "gather":
            return super().first_bad()
        kind = "sum" if not sum_oracle.is_boundary(way) else ("streams", "norm")[first.src_rank]
        expected = Origin(self.comm.rank, first.gather, first.replay, first.index)
        return BadWord(self.comm.rank, expected, first.wanted, first.seen, kind, None)

    def _way(self, gather: int, words: int) -> Way:
        return sum_oracle.way_of(self._op, gather, words)

    def _collect(self, step: CollectiveStep) -> None:
        way = self._way(step.gather, step.words)
        if way == "gather":
            super()._collect(step)
        elif sum_oracle.is_boundary(way):
            self._bound(step, sum_oracle.rows_of(step.words, self._max_rows), way)
        else:
            self._sum(step, way)

    def _sum(self, step: CollectiveStep, way: Way) -> None:
        """A sum of `step.words` words, or this rank's part of it."""
        start, stop = self._held(way, step.words)
        mine = self.x[step.gather, : step.words].view(torch.bfloat16).view(step.words, 2)
        result = self.out[step.gather, : stop - start].view(torch.bfloat16).view(stop - start, 2)
        if way == "scatter":
            self.comm.reduce_scatter(mine, result)
        else:
            self.comm.all_reduce(mine, result, protocol=way)

    def _bound(self, step: CollectiveStep, rows: int, way: Way) -> None:
        """One boundary of `rows` rows."""
        case, protocol = self._boundaries[step.gather], way.removeprefix("mhc_")
        self._mhc(
            case.x[:rows], case.residual[:rows], case.post[:rows], case.comb[:rows], case.pre[:rows], self._weight, EPS,
            new_residual=case.new_residual[:rows], h=case.h[:rows], protocol=protocol,
        )  # fmt: skip

    def _held(self, way: Way, words: int) -> tuple[int, int]:
        """Which words of a sum this rank holds."""
        return sum_oracle.part_of(words, self.comm.rank, self.comm.world_size) if way == "scatter" else (0, words)

    def _settle(self, kernel: CompiledKernel, y: torch.Tensor | None, gather: int, rows: int, cell: int) -> None:
        """Checks the outputs of a boundary, or computes them from the sum `y`."""
        case = self._boundaries[gather]
        work = BoundaryOutputs(
            0 if y is None else y.data_ptr(), case.new_residual.data_ptr(), case.h.data_ptr(), self._weight.data_ptr(),
            self._scratch.data_ptr(), gather, rows, cell,
        )  # fmt: skip
        self._launch(kernel, work, min(rows, MAX_CTAS))

    def _launch_turn(self, turn: TurnStep) -> None:
        start, stop, numbers = list(NOTHING), list(NOTHING), list(NOTHING)
        gathered, sent, checked = list(NOTHING), list(NOTHING), 0
        for gather, (done, coming) in enumerate(zip(turn.check, turn.fill, strict=True)):
            if done and (way := self._way(gather, done)) == "gather":
                gathered[gather] = done
            elif done:
                checked += 1
                if sum_oracle.is_boundary(way):
                    rows = sum_oracle.rows_of(done, self._max_rows)
                    self._settle(self._check, None, gather, rows, turn.cell_in)
                else:
                    start[gather], stop[gather] = self._held(way, done)
            if coming and (way := self._way(gather, coming)) == "gather":
                sent[gather] = coming
            elif coming and sum_oracle.is_boundary(way):
                self._launch_fill(gather, sum_oracle.rows_of(coming, self._max_rows), turn)
            elif coming:
                numbers[gather] = coming
        if checked or any(numbers):
            longest = max(*numbers, *(b - a for a, b in zip(start, stop, strict=True)))
            work = SumTurn(tuple(start), tuple(stop), tuple(numbers), checked, turn.cell_in, turn.step)
            self._launch(self._sum_turn, work, num_ctas(longest))
        super()._launch_turn(replace(turn, check=tuple(gathered), fill=tuple(sent)))

    def _launch_fill(self, gather: int, rows: int, turn: TurnStep) -> None:
        case = self._boundaries[gather]
        work = BoundaryInputs(
            case.x.data_ptr(), case.residual.data_ptr(), case.post.data_ptr(), case.comb.data_ptr(),
            case.pre.data_ptr(), gather, rows, turn.cell_in, turn.step,
        )  # fmt: skip
        self._launch(self._fill, work, min(rows, MAX_CTAS))
