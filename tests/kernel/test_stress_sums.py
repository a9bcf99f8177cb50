# SPDX-License-Identifier: Apache-2.0
"""The stress of reductions (`--op mixed`): right sums pass, and one wrong value of one rank is seen."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from stress.replay_gpu import VirtualRunner
from stress.run import Outcome, Progress, RunConfig

pytestmark = pytest.mark.gpu


def run(seed: int, replays: int = 64) -> Outcome:
    config = RunConfig(
        world="virtual", transport="auto", protocol="mailbox", op="mixed", ranks=4, seed=seed, replays=replays,
        duration_s=None, timeout_s=10.0,
    )  # fmt: skip

    def on_hang(config: RunConfig, hang: object) -> None:
        raise AssertionError(str(hang))

    return VirtualRunner(torch.device("cuda", 0), on_hang).run(config, Progress())


def test_sums_of_all_ways_are_right(seed):
    outcome = run(seed)
    assert outcome.hang is None
    assert outcome.bad_words == 0
    assert outcome.gathers >= 64 * 3
    assert outcome.audit == ()


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_one_wrong_value_is_seen(seed, op, monkeypatch):
    right = getattr(nvcomm.Communicator, op)

    def wrong(self, x, out, **options):
        right(self, x, out, **options)
        if self.rank == 1 and out.numel():
            out[0, 1].add_(1.0)
        return out

    monkeypatch.setattr(nvcomm.Communicator, op, wrong)
    assert run(seed).bad_words > 0
