# SPDX-License-Identifier: Apache-2.0
"""The stress of sums between CPU processes: proven with a control that fails, and wrong values are seen and named."""

from __future__ import annotations

import platform

import pytest
import torch

from nvcomm.host import HostEngine
from nvcomm.host.all_reduce_mhc import HostBoundary
from stress import report
from stress.control import run_control
from stress.replay_host import HostRunner
from stress.run import Outcome, Progress, RunConfig

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the host world runs on x86-64 alone")
OPS = ("all_reduce", "all_reduce_mhc", "mixed")


def config(op: str, seed: int, **changes: object) -> RunConfig:
    return RunConfig(
        world="host", transport="auto", protocol="mailbox", op=op, ranks=3, seed=seed, replays=12, duration_s=None,
        timeout_s=30.0,
    ).but(**changes)  # fmt: skip


def run(wanted: RunConfig) -> Outcome:
    return HostRunner().run(wanted, Progress())


@pytest.mark.parametrize("transport", ["peer", "delayed"])
@pytest.mark.parametrize("op", OPS)
def test_a_run_is_proven_and_its_control_fails(op, transport, seed):
    wanted = config(op, seed, transport=transport)
    control = run_control(HostRunner(), wanted, Progress())
    assert control.failed_as_it_must, control.summary
    few = 24 if op == "mixed" else 12  # every collective occurs, but for bad luck: 1 in 100,000
    wanted = wanted.but(replays=max(few, control.replays_to_fail))
    result = report.Report(wanted, run(wanted), control, {})
    assert result.verdict == "proven", (result.outcome.first_bad, result.outcome.audit)
    assert result.outcome.gathers == 3 * wanted.replays


def test_the_known_bad_protocol_names_a_wrong_sum(seed):
    for attempt in range(4):  # it may also lose a word, and hang before it has shown a wrong one
        wrong = config("all_reduce", seed + attempt, protocol="late-copy", replays=400, timeout_s=3.0, stop_on_bad=True)
        outcome = run(wrong)
        if outcome.first_bad:
            break
    assert outcome.first_bad, outcome.hang
    assert outcome.first_bad.kind == "sum"
    assert "of the sum that is collective" in str(outcome.first_bad)
    assert outcome.first_bad.expected_word != outcome.first_bad.seen_word


def spoil(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.view(-1)[1] += 64.0


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_one_wrong_sum_is_seen(op, seed, monkeypatch):
    right = getattr(HostEngine, op)

    def wrong(self, x, out, *options):
        right(self, x, out, *options)
        if self.rank == 1:
            spoil(out)

    monkeypatch.setattr(HostEngine, op, wrong)  # the ranks are forked
    outcome = run(config("mixed", seed))
    assert outcome.bad_words > 0
    assert outcome.first_bad.kind == "sum"


@pytest.mark.parametrize(("result", "kind"), [("new_residual", "streams"), ("h", "norm")])
def test_one_wrong_value_of_a_boundary_is_seen(result, kind, seed, monkeypatch):
    right = HostBoundary.fused

    def wrong(self, x, tensors, protocol):
        right(self, x, tensors, protocol)
        spoil(getattr(tensors, result))

    monkeypatch.setattr(HostBoundary, "fused", wrong)
    outcome = run(config("all_reduce_mhc", seed))
    assert outcome.bad_words > 0
    assert outcome.first_bad.kind == kind
