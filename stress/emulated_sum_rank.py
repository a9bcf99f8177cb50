# SPDX-License-Identifier: Apache-2.0
"""A rank whose sums are made of all-gathers: the known-bad protocol, the negative control, has no other collectives.

Rows are gathered, added up by a kernel of the stress run's own, and for a boundary mixed by another. Both kernels are
compared with the references of the library, from their PTX (tests/unit/test_stress_sums_on_cpu.py).
"""

from __future__ import annotations

import torch

from stress.boundary_tensors import HIDDEN
from stress.gpu_rank import Gatherer
from stress.graph_steps import CollectiveStep
from stress.kernels.add_rows import AddRowsKernel, Rows
from stress.kernels.boundary_check import BoundaryCheckKernel, BoundaryOutputs
from stress.kernels.kernel import load, num_ctas
from stress.plan import Plan
from stress.sum_oracle import Way
from stress.sum_rank import ROW_WORDS, SumRank


class EmulatedSumRank(SumRank):
    """Parameters as for `SumRank`."""

    def __init__(self, comm: Gatherer, plan: Plan, device: torch.device, stream: torch.cuda.Stream, op: str) -> None:
        super().__init__(comm, plan, device, stream, op)
        self._rows = torch.zeros(self._sum_words * comm.world_size, dtype=torch.int32, device=device)
        self._y = torch.zeros(self._sum_words, dtype=torch.int32, device=device)
        self._add_rows = load(AddRowsKernel(comm.world_size))
        self._mix = load(BoundaryCheckKernel(comm.world_size, HIDDEN, compare=False))

    def _load_collectives(self) -> None:
        self._launch(self._add_rows, Rows(0, 0, 0, 0, 0), 1)
        self._launch(self._mix, BoundaryOutputs(0, 0, 0, 0, 0, gather=0, rows=0, cell=0), 1)

    def _sum(self, step: CollectiveStep, way: Way) -> None:
        start, stop = self._held(way, step.words)
        self._gather_and_add(self.x[step.gather, : step.words], start, stop, self.out[step.gather])

    def _bound(self, step: CollectiveStep, rows: int, way: Way) -> None:
        x = self._boundaries[step.gather].x[:rows].view(-1).view(torch.int32)
        self._gather_and_add(x, 0, rows * ROW_WORDS, self._y)
        self._settle(self._mix, self._y, step.gather, rows, step.cell)

    def _gather_and_add(self, x: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Words `start` to `stop - 1` of the sum of `x` over the ranks, to `out`."""
        words = x.numel()
        rows = self._rows[: words * self.comm.world_size].view(self.comm.world_size, words)
        self.comm.all_gather(x, out=rows)
        work = Rows(rows.data_ptr(), words, start, stop, out.data_ptr())
        self._launch(self._add_rows, work, num_ctas(stop - start))
