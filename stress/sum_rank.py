# SPDX-License-Identifier: Apache-2.0
"""One rank of a replay of sums on a GPU: its collectives are those of the run's operation, checked like gathers.

For the negative control (`emulate`) each is made of the known-bad gather: rows are gathered, added up by a kernel of
the stress run's own, and for a boundary mixed by another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nvcomm.jit import CompiledKernel
from stress import sum_oracle
from stress.decode import BadWord, Origin
from stress.gpu_rank import Gatherer, GpuRank
from stress.graph_steps import NOTHING, CollectiveStep, TurnStep
from stress.kernels.add_rows import AddRowsKernel, Rows
from stress.kernels.boundary_check import BoundaryCheckKernel, BoundaryOutputs
from stress.kernels.boundary_fill import BoundaryFillKernel, BoundaryInputs
from stress.kernels.kernel import load, num_ctas
from stress.kernels.sum_turn import SumTurn, SumTurnKernel
from stress.plan import MAX_BYTES, Plan
from stress.sum_oracle import EPS, STREAMS, Way

HIDDEN = 5120
MAX_ROWS = 384
MAX_CTAS = 64  # of the kernels around boundaries: a CTA takes a row
_ROW_WORDS = HIDDEN // 2


class SumRank(GpuRank):
    """A rank whose collectives are those of `op`.

    Args:
        comm: its communicator, of at least MAX_BYTES.
        plan: what will be replayed.
        device: the rank's GPU.
        stream: the rank's stream.
        op: operation of the run.
        emulate: make every collective of all-gathers: the known-bad protocol has no others.
    """

    def __init__(
        self, comm: Gatherer, plan: Plan, device: torch.device, stream: torch.cuda.Stream, op: str, *, emulate: bool
    ) -> None:
        super().__init__(comm, plan, device, stream)
        self._op = op
        self._emulate = emulate
        self._max_rows = max(1, min(MAX_ROWS, min(plan.config.max_bytes, MAX_BYTES) // (HIDDEN * 2)))
        self._boundaries = [Boundary(self._max_rows, device) for _ in NOTHING] if self._has_boundaries else []
        self._weight = (1 + torch.arange(HIDDEN, device=device) % 8 / 8).bfloat16()
        words = max(self._x_words, self._max_rows * _ROW_WORDS)
        self._scratch = torch.zeros(words, dtype=torch.int32, device=device)
        self._rows = torch.zeros(words * comm.world_size if emulate else 0, dtype=torch.int32, device=device)
        self._y = torch.zeros(words if emulate else 0, dtype=torch.int32, device=device)
        self._sum_turn = load(SumTurnKernel(comm.world_size))
        self._add_rows = load(AddRowsKernel(comm.world_size))
        self._fill = load(BoundaryFillKernel(HIDDEN))
        self._check = load(BoundaryCheckKernel(comm.world_size, HIDDEN, compare=True))
        self._mix = load(BoundaryCheckKernel(comm.world_size, HIDDEN, compare=False))
        self._mhc: Any = None

    @property
    def _has_boundaries(self) -> bool:
        return any(sum_oracle.is_boundary(way) for way in sum_oracle.WAYS[self._op])

    def load(self) -> None:
        """Loads the collectives' kernels and the checks', too."""
        if not self._emulate:
            for op in ("all_reduce", "reduce_scatter"):
                self.comm.prepare(op, torch.bfloat16)
            if self._has_boundaries:
                self._mhc = self.comm.mhc(HIDDEN, num_streams=STREAMS)
        self._launch(self._add_rows, Rows(0, 0, 0, 0, 0), 1)
        self._launch(self._fill, BoundaryInputs(0, 0, 0, 0, 0, gather=0, rows=0, cell=0, step=0), 1)
        for kernel in (self._check, self._mix):
            self._launch(kernel, BoundaryOutputs(0, 0, 0, 0, 0, gather=0, rows=0, cell=0), 1)
        self._launch(self._sum_turn, SumTurn(NOTHING, NOTHING, NOTHING, checked=0, cell=0, step=0), 1)
        super().load()

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
        gather, words = step.gather, step.words
        way = self._way(gather, words)
        if way == "gather":
            super()._collect(step)
        elif sum_oracle.is_boundary(way):
            self._bound(step, sum_oracle.rows_of(words, self._max_rows), way)
        elif self._emulate:
            start, stop = self._held(way, words)
            self._emulate_sum(self.x[gather, :words], start, stop, self.out[gather])
        else:
            mine = self.x[gather, :words].view(torch.bfloat16).view(words, 2)
            start, stop = self._held(way, words)
            result = self.out[gather, : stop - start].view(torch.bfloat16).view(stop - start, 2)
            if way == "scatter":
                self.comm.reduce_scatter(mine, result)
            else:
                self.comm.all_reduce(mine, result, protocol=way)

    def _held(self, way: Way, words: int) -> tuple[int, int]:
        """Which words of a sum this rank holds."""
        return sum_oracle.part_of(words, self.comm.rank, self.comm.world_size) if way == "scatter" else (0, words)

    def _emulate_sum(self, x: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        words = x.numel()
        rows = self._rows[: words * self.comm.world_size].view(self.comm.world_size, words)
        self.comm.all_gather(x, out=rows)
        work = Rows(rows.data_ptr(), words, start, stop, out.data_ptr())
        self._launch(self._add_rows, work, num_ctas(stop - start))

    def _bound(self, step: CollectiveStep, rows: int, way: Way) -> None:
        """One boundary of `rows` rows."""
        case = self._boundaries[step.gather]
        if self._emulate:
            words = rows * _ROW_WORDS
            self._emulate_sum(case.x[:rows].view(-1).view(torch.int32), 0, words, self._y)
            self._settle(self._mix, step.gather, rows, step.cell)
            return
        protocol = way.removeprefix("mhc_")
        self._mhc(
            case.x[:rows], case.residual[:rows], case.post[:rows], case.comb[:rows], case.pre[:rows], self._weight, EPS,
            new_residual=case.new_residual[:rows], h=case.h[:rows], protocol=protocol,
        )  # fmt: skip

    def _settle(self, kernel: CompiledKernel, gather: int, rows: int, cell: int) -> None:
        """Checks the outputs of a boundary, or computes them."""
        case = self._boundaries[gather]
        work = BoundaryOutputs(
            self._y.data_ptr(), case.new_residual.data_ptr(), case.h.data_ptr(), self._weight.data_ptr(),
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
                    self._settle(self._check, gather, rows, turn.cell_in)
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


class Boundary:
    """Tensors of one boundary, of `max_rows` rows, on `device`."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self.x, self.h = zeros(HIDDEN), zeros(HIDDEN)
        self.residual, self.new_residual = zeros(STREAMS, HIDDEN), zeros(STREAMS, HIDDEN)
        self.post, self.pre = zeros(STREAMS, dtype=torch.float32), zeros(STREAMS, dtype=torch.float32)
        self.comb = zeros(STREAMS, STREAMS, dtype=torch.float32)
