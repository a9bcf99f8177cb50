# SPDX-License-Identifier: Apache-2.0
"""Verdicts, exit codes, the report of a hang, the control, the watchdog and the ledger: without running anything."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from nvcomm.errors import PeerTimeoutError, UsageError
from stress import ledger, oracle, report
from stress.cli import parse
from stress.control import CONTROL_ATTEMPTS, Control, run_control
from stress.decode import BadWord, Origin
from stress.hang import Hang, Position, Wait
from stress.run import Outcome, Progress, RunConfig
from stress.watchdog import Watchdog

CONFIG = RunConfig("host", "peer", "mailbox", "all_gather", 4, 1, 10, None, 1.0)
STALE = BadWord(1, Origin(0, 1, 9, 5), 0x11111111, 0x22222222, "stale", Origin(2, 0, 8, 7))
FILLED = BadWord(1, Origin(0, 1, 9, 5), 0x11111111, 0xFFFFFFFF, "filled", None)
GOOD = Outcome(replays=10, gathers=30, bad_words=0, first_bad=None, seconds=1.0)
WRONG = Outcome(replays=10, gathers=30, bad_words=4, first_bad=STALE, seconds=1.0)
CONTROL = Control(WRONG)
WAIT = Wait(0, 2, 7, 1, 0, 1.5, 2)


def outcome(**changes) -> Outcome:
    return Outcome(**{name: getattr(GOOD, name) for name in GOOD.__slots__} | changes)


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
    assert "9 replays, and the control took 10 to fail" in text.getvalue()


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


def test_a_ledger_reads_as_it_was_written():
    words = [0] * ledger.LEDGER_WORDS
    words[0], words[ledger.GATHERS] = 1000, 3000
    assert ledger.read(words) == ledger.LedgerReading(1000, 3000, 0, None)
    words[ledger.BAD_WORDS], words[ledger.LOCK] = 7, 1
    words[ledger.FIRST_REPLAY : ledger.FIRST_SEEN + 1] = [900, 2, 3, 44, -5]
    assert ledger.read(words).first == ledger.Mismatch(900, 2, 3, 44, 0xFFFFFFFB)
    assert ledger.read(words).bad_words == 7


def test_a_count_of_wrong_words_that_went_round_is_not_none():
    words = [0] * ledger.LEDGER_WORDS
    words[ledger.LOCK] = 1
    assert ledger.read(words).bad_words == 1 << 32


def test_a_run_ends_before_words_repeat():
    assert CONFIG.replay_limit == 10
    assert CONFIG.but(replays=None, duration_s=1e6).replay_limit == 1 << 27


def test_defaults_of_the_command_line():
    options = parse([])
    assert (options.world, options.transport, options.protocol) == ("auto", "auto", "mailbox")
    assert options.control
    assert options.replays is None
    assert options.duration_s == 45.0
    assert parse(["--replays", "5"]).duration_s is None
    assert not parse(["--protocol", "late-copy"]).control
    assert not parse(["--control", "none"]).control
    assert parse(["--seed", "0x10"]).seed == 16


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transport", "multicast", "--world", "virtual"],
        ["--timeout", "0"],
        ["--op", "x"],
        ["--control", "mailbox"],  # a protocol that holds would show nothing
        ["--replays", str(oracle.MAX_REPLAYS + 1)],  # words would repeat
    ],
)
def test_bad_arguments_end_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
