# SPDX-License-Identifier: Apache-2.0
"""What a run between CPU processes comes to, read from a status page that nobody else writes."""

from __future__ import annotations

import json
from unittest import mock

import pytest

pytest.importorskip("torch")

from nvcomm.mailbox import NUM_SLOTS
from stress import report, worker
from stress.host_outcome import Fate, RankFailedError, outcome_of
from stress.page import Field, State, StatusPage
from stress.plan import Plan, PlanConfig
from stress.run import FIRST_GENERATION, RunConfig
from tests.unit.stress_outcomes import CONTROL

RANKS, REPLAYS = 3, 12
CONFIG = RunConfig("host", "peer", "mailbox", "all_gather", RANKS, 1, REPLAYS, None, 1.0)
PLAN = Plan(PlanConfig(1, RANKS))


@pytest.fixture
def page() -> StatusPage:
    """Of a run in which all went well."""
    page = StatusPage(RANKS)
    end = {"slot": 3 * REPLAYS % NUM_SLOTS, "generation": FIRST_GENERATION + 3 * REPLAYS, "dirty_words": 0}
    for rank in range(RANKS):
        page.set_text(rank, json.dumps({"audit": end, "stats": {"calls": 3 * REPLAYS}}))
        line = page.line(rank)
        line[Field.REPLAY], line[Field.GATHERS], line[Field.STATE] = REPLAYS, 3 * REPLAYS, State.DONE
        line[Field.STARTED_NS], line[Field.ENDED_NS] = 1, 2
    return page


def spoil(page: StatusPage, rank: int) -> None:
    """One wrong word in the last replay."""
    line = page.line(rank)
    line[Field.BAD_REPLAY : Field.BAD_SEEN + 1] = (REPLAYS - 1, 2, 0, 0, 0x12345678)
    line[Field.BAD_WORDS] = 1


def result(page: StatusPage, config: RunConfig = CONFIG) -> report.Report:
    return report.Report(config, outcome_of(config, PLAN, page, None, [Fate()] * RANKS), CONTROL, {})


def test_all_went_well(page):
    assert result(page).verdict == "proven"


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_wrong_word_of_any_rank_fails_it(page, rank):
    spoil(page, rank)
    failed = result(page)
    assert (failed.verdict, failed.exit_code, failed.outcome.bad_words) == ("failed", report.EXIT_BAD, 1)
    assert (failed.outcome.first_bad.dst_rank, failed.outcome.first_bad.expected.replay) == (rank, REPLAYS - 1)


@pytest.mark.parametrize(("field", "count"), [(Field.REPLAY, REPLAYS - 1), (Field.GATHERS, 3 * REPLAYS - 1)])
@pytest.mark.parametrize("duration_s", [None, 5.0])
def test_a_rank_that_did_less_fails_it(page, field, count, duration_s):
    page.line(RANKS - 1)[field] = count
    failed = result(page, CONFIG.but(duration_s=duration_s))
    assert (failed.verdict, failed.exit_code) == ("failed", report.EXIT_BAD)


def test_all_ranks_that_did_less_fail_it(page):
    page.lines[:, Field.REPLAY] -= 1
    assert result(page).verdict == "failed"


def test_a_rank_that_gave_up_or_stands_still_is_a_hang(page):
    for state in (State.TIMED_OUT, State.RUNNING, State.SETUP):
        page.line(1)[Field.STATE] = state
        assert result(page).exit_code == report.EXIT_HANG


def test_a_rank_that_is_gone_before_the_first_replay_is_named():
    page = StatusPage(RANKS)
    page.line(0)[Field.STATE] = State.ALONE
    fates = [Fate("rank 0 waited for rank 2"), Fate("runs"), Fate("is stopped", gone=True)]
    outcome = outcome_of(CONFIG, PLAN, page, "rank 0 ended", fates)
    assert (outcome.hang.root_ranks, outcome.seconds) == ((2,), 0.0)
    assert [position.note for position in outcome.hang.positions] == [fate.note for fate in fates]
    assert report.Report(CONFIG, outcome, CONTROL, {}).exit_code == report.EXIT_HANG


def test_a_rank_whose_others_do_not_come_says_who_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "SETUP_S", 0.5)
    for name in ("ctypes.CDLL", "torch.set_num_threads", "os._exit"):  # for a process of its own
        monkeypatch.setattr(name, mock.Mock())
    page = StatusPage(RANKS)
    worker.main(0, CONFIG.but(timeout_s=0.5), PLAN, page, tmp_path / "store")
    assert page.state(0) is State.ALONE
    assert "for rank 1, 2 of 3, in vain" in page.text(0)


def test_a_rank_that_fails_does_not_hide_a_wrong_word_of_another(page):
    spoil(page, 0)
    page.line(2)[Field.STATE] = State.FAILED
    page.set_text(2, "Traceback")
    with pytest.raises(RankFailedError, match=r"rank 2 failed:\nTraceback\nBefore that: rank 0 expected word 0"):
        result(page)
