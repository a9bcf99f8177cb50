# SPDX-License-Identifier: Apache-2.0
"""The watchdog: it reports and ends a run that is silent, and leaves others alone."""

from __future__ import annotations

import threading

import pytest

from stress.hang import Hang
from stress.watchdog import Watchdog
from tests.unit.stress_outcomes import WAIT


@pytest.mark.parametrize("code", [124, 1])
def test_the_watchdog_reports_and_ends_a_silent_run(code):
    ended = threading.Event()
    seen = []

    def end(code: int) -> None:
        seen.append(code)
        ended.set()

    def tell(hang: Hang) -> int:
        seen.append(hang)
        return code

    with Watchdog(0.2, lambda reason: Hang(reason, (WAIT,)), tell, end):
        assert ended.wait(5)
    assert seen[0].reason.startswith("no progress for")
    assert seen[1] == code


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watchdog_that_cannot_report_ends_with_124():
    ended = threading.Event()
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def explain(reason: str) -> Hang:
        raise ValueError("cannot say")

    with Watchdog(0.2, explain, lambda hang: 1, end):
        assert ended.wait(5)
    assert codes == [124]


def test_the_watchdog_leaves_a_beating_run_alone():
    ended = threading.Event()
    with Watchdog(0.4, Hang, lambda hang: 124, lambda code: ended.set()) as watchdog:
        for _ in range(20):
            watchdog.beat()
            assert not ended.wait(0.05)
