# SPDX-License-Identifier: Apache-2.0
"""The negative control: what counts as failing as it must, and when it gets another try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stress.control import CONTROL_ATTEMPTS, Control, run_control
from stress.decode import Origin
from stress.hang import Hang
from stress.run import Outcome, Progress, RunConfig
from tests.unit.stress_outcomes import CONFIG, GOOD, STALE, WRONG, outcome


class ScriptedRunner:
    """Gives one prepared outcome after the other."""

    reports = True

    def agreed(self, config: RunConfig) -> RunConfig:
        return config

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[RunConfig] = []

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        self.asked.append(config)
        return self.outcomes.pop(0)

    def close(self) -> None:
        """Nothing to close."""


def test_a_control_that_hangs_before_it_shows_anything_gets_another_try():
    runner = ScriptedRunner(outcome(gathers=0, hang=Hang("stuck")), WRONG)
    control = run_control(runner, CONFIG, Progress())
    assert control.failed_as_it_must
    assert [one.protocol for one in runner.asked] == ["late-copy", "late-copy"]
    assert runner.asked[0].seed != runner.asked[1].seed
    assert all(one.stop_on_bad for one in runner.asked)


def test_a_control_that_saw_only_damage_without_an_origin_gets_another_try():
    damaged = outcome(bad_words=5, first_bad=replace(WRONG.first_bad, kind="unknown", seen=None))
    runner = ScriptedRunner(damaged, WRONG)
    assert run_control(runner, CONFIG, Progress()).failed_as_it_must
    assert not run_control(ScriptedRunner(*[damaged] * CONTROL_ATTEMPTS), CONFIG, Progress()).failed_as_it_must


@pytest.mark.parametrize("kind", ["addend", "sum", "streams", "norm"])
def test_a_control_of_sums_fails_as_it_must_once_a_word_can_be_stale(kind):
    """Before its second use no slot holds an earlier word: a sum wrong by then was formed or compared wrongly."""
    for replay, gather, as_it_must in ((0, 0, False), (0, 1, False), (0, 2, True), (1, 0, True)):
        first = replace(STALE, kind=kind, seen=None, expected=Origin(0, gather, replay, 5))
        assert Control(outcome(bad_words=5, first_bad=first)).failed_as_it_must == as_it_must


@pytest.mark.parametrize("kind", ["reserved", "filled", "unknown", "early", "misplaced"])
def test_other_damage_is_no_proof_that_stale_words_are_seen(kind):
    assert not Control(outcome(bad_words=5, first_bad=replace(STALE, kind=kind))).failed_as_it_must


def test_a_control_that_ends_well_is_not_tried_until_it_fails():
    runner = ScriptedRunner(GOOD, WRONG)
    assert not run_control(runner, CONFIG, Progress()).failed_as_it_must
    assert len(runner.asked) == 1
