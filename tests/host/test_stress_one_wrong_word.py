# SPDX-License-Identifier: Apache-2.0
"""A stress run in which a single word is wrong: whatever its kind, in the first or the last replay, it is counted.

It is the last word of what the last rank received. The kernels' own counting: tests/unit/test_stress_turn_on_cpu.py.
"""

from __future__ import annotations

import platform

import pytest
import torch

from stress import report, sum_oracle
from stress.control import Control
from stress.decode import BadWord, Origin
from stress.host_sums import HostSumRank
from stress.oracle import GATHERS_PER_REPLAY
from stress.page import Field
from stress.replay_host import HostRunner, plan_for
from stress.run import Outcome, Progress, RunConfig

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the host world runs on x86-64 alone")
RANKS, REPLAYS = 3, 8
SEED = 12  # of a plan in whose first replays every collective occurs
LAST = RANKS - 1
STALE = BadWord(1, Origin(0, 0, 1, 5), 1, 2, "stale", Origin(2, 0, 0, 7))
CONTROL = Control(Outcome(replays=2, gathers=6, bad_words=4, first_bad=STALE, seconds=1.0))

# What is spoiled -> the collectives that it comes from, and where a rank keeps it.
BOUNDARY = {"mhc_ll", "mhc_two_shot"}
SPOILED = {
    "gather": ({"gather"}, lambda rank, gather, words: rank._outs[gather][: words * RANKS]),
    "sum": ({"ll", "two_shot"}, lambda rank, gather, words: rank._results[gather][0]),
    "part of a sum": ({"scatter"}, lambda rank, gather, words: rank._results[gather][0]),
    "streams": (BOUNDARY, lambda rank, gather, words: rank._results[gather][0]),
    "norm": (BOUNDARY, lambda rank, gather, words: rank._results[gather][1]),
}


def flip(tensor: torch.Tensor) -> None:
    """Another number in the upper half of the last word, NaN or not."""
    tensor.view(torch.int16).view(-1)[-1] ^= 0x4000


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("what", SPOILED)
def test_it_is_counted_and_placed(what, which, monkeypatch):
    ways, result = SPOILED[what]
    config = RunConfig("host", "auto", "mailbox", "mixed", RANKS, SEED, REPLAYS, None, 10.0)
    plan = plan_for(config)
    replay, gather = [
        (replay, gather)
        for replay in range(REPLAYS)
        for gather in range(GATHERS_PER_REPLAY)
        if sum_oracle.way_of("mixed", gather, plan.row_words(gather, replay)) in ways
    ][which]
    right = HostSumRank._gather

    def wrong(self, at, words):
        right(self, at, words)
        if (self._engine.rank, self._line[Field.REPLAY], at) == (LAST, replay, gather):
            flip(result(self, at, words))

    monkeypatch.setattr(HostSumRank, "_gather", wrong)  # the ranks are forked
    outcome = HostRunner().run(config, Progress())
    assert outcome.bad_words == 1
    bad = outcome.first_bad
    assert (bad.dst_rank, bad.expected.replay, bad.expected.gather) == (LAST, replay, gather)
    if what in ("streams", "norm"):
        assert bad.kind == what
    else:
        assert bad.expected.index == plan.row_words(gather, replay) - 1
    assert report.Report(config, outcome, CONTROL, {}).exit_code == report.EXIT_BAD
