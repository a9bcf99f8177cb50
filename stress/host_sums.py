# SPDX-License-Identifier: Apache-2.0
"""Sums between CPU processes: the rank that replays them, and what a wrong word of one is.

For the negative control each collective is made of the known-bad gather, as on a GPU (`emulated_sum_rank.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nvcomm.collectives.all_reduce_mhc_checks import BoundaryTensors
from nvcomm.collectives.all_reduce_mhc_config import MhcShape
from nvcomm.reference import collectives as reference
from stress import sum_oracle
from stress.decode import BadWord, Origin
from stress.host_sum_oracle import HIDDEN, Bf16, Case, SumOracle, wrong_words
from stress.page import Field, StatusPage
from stress.plan import Plan
from stress.run import RunConfig
from stress.sum_oracle import EPS, STREAMS, Way
from stress.worker import HostRank

if TYPE_CHECKING:
    from nvcomm.host import HostEngine

MAX_ROWS = 24
NORM_WEIGHT = (1 + torch.arange(HIDDEN) % 8 / 8).bfloat16()


class HostSumRank(HostRank):
    """A rank whose collectives are those of the run's operation."""

    def __init__(self, engine: HostEngine, config: RunConfig, plan: Plan, page: StatusPage) -> None:
        super().__init__(engine, config, plan, page)
        self._sums = SumOracle(plan.oracle, plan.config.reserved_per_65536)
        self._emulate = config.protocol != "mailbox"
        self._mhc = engine.mhc(MhcShape(HIDDEN, STREAMS), ("fused",))
        self._contributions: dict[int, Bf16] = {}
        self._cases: dict[int, Case] = {}
        self._results: dict[int, tuple[Bf16, Bf16]] = {}

    def _fill(self, gather: int, replay: int, words: int) -> None:
        way = self._way(gather, words)
        if way == "gather":
            super()._fill(gather, replay, words)
        elif sum_oracle.is_boundary(way):
            case = self._sums.boundary(gather, replay, sum_oracle.rows_of(words, self._max_rows))
            self._cases[gather] = case
            self._contributions[gather] = case.xs[self._engine.rank].contiguous()
        else:
            self._contributions[gather] = self._sums.contribution(self._engine.rank, gather, replay, words)

    def _gather(self, gather: int, words: int) -> None:
        way = self._way(gather, words)
        if way == "gather":
            super()._gather(gather, words)
            return
        mine = self._contributions[gather]
        if sum_oracle.is_boundary(way):
            self._results[gather] = self._bound(gather, mine, way)
            return
        start, stop = self._held(way, words)
        if self._emulate:
            result = self._emulated(mine)[start:stop]
        else:
            result = torch.empty((stop - start, 2), dtype=torch.bfloat16)
            if way == "scatter":
                self._engine.reduce_scatter(mine, result)
            else:
                self._engine.all_reduce(mine, result, way)
        self._results[gather] = (result, result)

    def _bound(self, gather: int, mine: Bf16, way: Way) -> tuple[Bf16, Bf16]:
        case = self._cases[gather]
        if self._emulate:
            y = self._emulated(mine)
            mixed = reference.mhc_boundary(y, case.residual, case.post, case.comb, case.pre, NORM_WEIGHT, EPS)
            assert mixed[1] is not None
            return mixed[0], mixed[1]
        new_residual, h = torch.empty_like(case.residual), torch.empty_like(mine)
        tensors = BoundaryTensors(
            case.residual, case.post, case.comb, case.pre, NORM_WEIGHT, EPS, new_residual, h
        )  # fmt: skip
        self._mhc.fused(mine, tensors, way.removeprefix("mhc_"))
        return new_residual, h

    def _emulated(self, mine: Bf16) -> Bf16:
        """The sum of gathered rows."""
        rows = torch.empty((self._engine.world_size, *mine.shape), dtype=mine.dtype)
        self._engine.all_gather(mine, rows)
        return rows.float().sum(0).to(mine.dtype)

    def _check(self, gather: int, replay: int, words: int) -> None:
        way = self._way(gather, words)
        if way == "gather":
            super()._check(gather, replay, words)
            return
        seen = self._results[gather]
        if sum_oracle.is_boundary(way):
            for part, want in enumerate(self._cases[gather].wanted(NORM_WEIGHT)):
                self._count(gather, replay, part, 0, seen[part], want)
        else:
            start, stop = self._held(way, words)
            self._count(gather, replay, 0, start, seen[0], self._sums.total(gather, replay, words)[start:stop])
        self._line[Field.GATHERS] += 1

    def _count(self, gather: int, replay: int, part: int, start: int, seen: Bf16, want: Bf16) -> None:
        """Counts wrong words; the first one's place goes to the page."""
        wrong = wrong_words(seen, want, ulps=part)
        line = self._line
        if len(wrong) and not line[Field.BAD_WORDS]:
            word = int(seen.contiguous().view(torch.int32).view(-1)[int(wrong[0])]) & 0xFFFFFFFF
            line[Field.BAD_REPLAY : Field.BAD_SEEN + 1] = (replay, gather, part, start + int(wrong[0]), word)
        line[Field.BAD_WORDS] += len(wrong)

    def _way(self, gather: int, words: int) -> Way:
        return sum_oracle.way_of(self._config.op, gather, words)

    def _held(self, way: Way, words: int) -> tuple[int, int]:
        rank, ranks = self._engine.rank, self._engine.world_size
        return sum_oracle.part_of(words, rank, ranks) if way == "scatter" else (0, words)

    @property
    def _max_rows(self) -> int:
        return max_rows(self._plan)


def max_rows(plan: Plan) -> int:
    """Most rows of a boundary."""
    return max(1, min(MAX_ROWS, plan.config.max_bytes // (HIDDEN * 2)))


def explain(plan: Plan, op: str, dst_rank: int, place: Origin, seen: int) -> BadWord | None:
    """A wrong word of a sum, or None where it is one of a gather. `place.rank` is 1 for the norm's output."""
    num_words = plan.row_words(place.gather, place.replay)
    way = sum_oracle.way_of(op, place.gather, num_words)
    if way == "gather":
        return None
    sums = SumOracle(plan.oracle, plan.config.reserved_per_65536)
    if sum_oracle.is_boundary(way):
        case = sums.boundary(place.gather, place.replay, sum_oracle.rows_of(num_words, max_rows(plan)))
        want, kind = case.wanted(NORM_WEIGHT)[place.rank], ("streams", "norm")[place.rank]
    else:
        want, kind = sums.total(place.gather, place.replay, num_words), "sum"
    word = int(want.contiguous().view(torch.int32).view(-1)[place.index]) & 0xFFFFFFFF
    return BadWord(dst_rank, Origin(dst_rank, place.gather, place.replay, place.index), word, seen, kind, None)
