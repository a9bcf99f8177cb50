# SPDX-License-Identifier: Apache-2.0
"""The stress of sums: right ones pass, one wrong value of one rank is seen, the known-bad protocol fails by itself."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from nvcomm.collectives.all_reduce_mhc import AllReduceMhc
from stress.control import Control
from stress.gpu_runners import VirtualRunner
from stress.run import Outcome, Progress, RunConfig

pytestmark = pytest.mark.gpu
OPS = ("all_reduce", "all_reduce_mhc", "mixed")


def run(seed: int, op: str, **changes: object) -> Outcome:
    config = RunConfig(
        world="virtual", transport="auto", protocol="mailbox", op=op, ranks=4, seed=seed, replays=64, duration_s=None,
        timeout_s=10.0,
    ).but(**changes)  # fmt: skip

    def on_hang(config: RunConfig, hang: object) -> None:
        raise AssertionError(str(hang))

    return VirtualRunner(torch.device("cuda", 0), on_hang).run(config, Progress())


@pytest.mark.parametrize(("transport", "pdl"), [("auto", "safe"), ("auto", "early"), ("delayed", "safe")])
@pytest.mark.parametrize("op", OPS)
def test_right_sums_pass(seed, op, transport, pdl):
    outcome = run(seed, op, transport=transport, pdl=pdl, replays=64 if transport == "auto" else 24)
    assert outcome.hang is None
    assert outcome.bad_words == 0, outcome.first_bad
    assert outcome.gathers == outcome.replays * 3
    assert outcome.audit == ()


@pytest.mark.parametrize(
    ("op", "kinds"), [("all_reduce", {"sum"}), ("all_reduce_mhc", {"streams", "norm"}), ("mixed", None)]
)
def test_the_known_bad_protocol_fails_by_itself(seed, op, kinds):
    outcome = run(seed, op, protocol="late-copy", stop_on_bad=True, replays=2000, timeout_s=2.0)
    assert Control(outcome).failed_as_it_must
    assert kinds is None or outcome.first_bad.kind in kinds
    assert outcome.first_bad.expected_word != outcome.first_bad.seen_word


def spoil(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.view(-1)[1].add_(64.0)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_one_wrong_sum_is_seen(seed, op, monkeypatch):
    right = getattr(nvcomm.Communicator, op)

    def wrong(self, x, out, **options):
        right(self, x, out, **options)
        if self.rank == 1:
            spoil(out)
        return out

    monkeypatch.setattr(nvcomm.Communicator, op, wrong)
    outcome = run(seed, "mixed", replays=48)
    assert outcome.bad_words > 0
    assert outcome.first_bad.kind == "sum"


@pytest.mark.parametrize("result", ["new_residual", "h"])
def test_one_wrong_value_of_a_boundary_is_seen(seed, result, monkeypatch):
    right = AllReduceMhc.__call__

    def wrong(self, *args, **options):
        right(self, *args, **options)
        if self.comm.rank == 1:
            spoil(options[result])

    monkeypatch.setattr(AllReduceMhc, "__call__", wrong)
    outcome = run(seed, "all_reduce_mhc", replays=48)
    assert outcome.bad_words > 0
    assert outcome.first_bad.kind == {"new_residual": "streams", "h": "norm"}[result]
