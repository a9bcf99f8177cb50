# SPDX-License-Identifier: Apache-2.0
"""Verdicts, exit codes, JSON, the table, and the report of a hang: without running anything."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from nvcomm.errors import PeerTimeoutError, UsageError
from stress import report
from stress.control import Control
from stress.decode import BadWord
from stress.hang import Hang, Position, Wait
from tests.unit.stress_outcomes import CONFIG, CONTROL, FILLED, GOOD, STALE, WAIT, WRONG, outcome

# A call that timed out leaves 0xFF bytes, and sums of them are some NaN.
SUM_OF_FILLING = replace(FILLED, kind="sum", seen_word=0x7FFFFFC0)
WRONG_SUM = replace(SUM_OF_FILLING, seen_word=0x7FFF4188)


@pytest.mark.parametrize(
    ("seen", "control", "verdict", "code"),
    [
        (GOOD, CONTROL, "proven", 0),
        (GOOD, None, "unproven", 3),
        (GOOD, Control(GOOD), "unproven", 3),
        (GOOD, Control(outcome(bad_words=3, first_bad=FILLED)), "unproven", 3),
        (outcome(replays=0, gathers=0), CONTROL, "unproven", 3),
        (outcome(first_bad=STALE), CONTROL, "failed", 1),  # the count went round
        (WRONG, CONTROL, "failed", 1),
        (outcome(audit=("3 words are not EMPTY",)), CONTROL, "failed", 1),
        (outcome(hang=Hang("stuck", (WAIT,))), CONTROL, "failed", 124),
        (outcome(hang=Hang("stuck", (WAIT,)), bad_words=9, first_bad=FILLED), CONTROL, "failed", 124),
        (outcome(hang=Hang("stuck", (WAIT,)), bad_words=9, first_bad=STALE), CONTROL, "failed", 1),
        (outcome(hang=Hang("stuck", (WAIT,)), bad_words=9, first_bad=SUM_OF_FILLING), CONTROL, "failed", 124),
        (outcome(hang=Hang("stuck", (WAIT,)), bad_words=9, first_bad=WRONG_SUM), CONTROL, "failed", 1),
        (outcome(bad_words=9, first_bad=SUM_OF_FILLING), CONTROL, "failed", 1),
        (outcome(missing=("scatter",)), CONTROL, "unproven", 3),
    ],
)
def test_verdict_and_exit_code(seen, control, verdict, code):
    result = report.Report(CONFIG, seen, control, {})
    assert (result.verdict, result.exit_code) == (verdict, code)
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["verdict"] == verdict


def test_a_run_of_fewer_replays_than_the_control_took_proves_nothing():
    assert CONTROL.replays_to_fail == 10
    for replays, verdict in ((9, "unproven"), (10, "proven")):
        result = report.Report(CONFIG, outcome(replays=replays), CONTROL, {})
        assert result.verdict == verdict
    text = io.StringIO()
    report.show(report.Report(CONFIG, outcome(replays=9), CONTROL, {}), Console(file=text, width=200))
    assert "the control took 10 replays to fail; the run had 9" in text.getvalue()


def test_the_known_bad_protocol_is_never_proven():
    result = report.Report(CONFIG.but(protocol="late-copy"), GOOD, CONTROL, {})
    assert (result.verdict, result.as_json()["doubts"]) == ("unproven", ["late-copy is known to be wrong"])


def test_a_run_that_is_broken_off_leaves_no_earlier_verdict(tmp_path):
    target = tmp_path / "out.json"
    report.write_json(report.Report(CONFIG, GOOD, CONTROL, {}), str(target))
    assert json.loads(target.read_text())["verdict"] == "proven"
    report.begin_json(str(target))
    assert target.read_text() == ""
    with pytest.raises(UsageError, match="cannot be written"):
        report.begin_json(str(tmp_path))


def test_the_table_names_the_first_wrong_word_and_who_waits_for_whom():
    text = io.StringIO()
    seen = outcome(bad_words=4, first_bad=STALE, hang=Hang("stuck", (WAIT,), (Position(2, 3, 1, "killed"),)))
    report.show(report.Report(CONFIG, seen, CONTROL, {}), Console(file=text, width=200))
    assert "expected word 5 of rank 0, gather 1 of replay 9 (0x11111111) and saw 0x22222222: stale" in text.getvalue()
    assert "word 7 of rank 2, gather 0 of replay 8" in text.getvalue()
    assert "rank 0 waits for rank 2: generation 7, slot 1, word 0, for 1.500 s" in text.getvalue()
    assert "rank 2 is in gather 1 of replay 3 (killed)" in text.getvalue()


def test_a_wrong_word_survives_json():
    assert BadWord.from_json(json.loads(json.dumps(STALE.as_json()))) == STALE
    assert BadWord.from_json(FILLED.as_json()) == FILLED


def test_the_root_of_a_hang_is_whoever_waits_for_nobody():
    waits = (Wait(0, 1, 5, 0, 0, 1.0, 1), Wait(1, 3, 5, 0, 0, 1.0, 3), Wait(2, 3, 5, 0, 0, 1.0, 3))
    assert Hang("", waits).root_ranks == (3,)
    assert Hang("", (), (Position(0, 5, 1), Position(1, 5, 0), Position(2, 6, 0))).root_ranks == (1,)
    error = PeerTimeoutError(4, 2, generation=9, slot=1, word=6, waited_s=0.5, root_rank=7)
    assert Wait.of(error) == Wait(4, 2, 9, 1, 6, 0.5, 7)
