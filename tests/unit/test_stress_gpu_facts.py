# SPDX-License-Identifier: Apache-2.0
"""What the processes of a peer world saw, put together: the same outcome on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

from nvcomm.errors import GroupError, UsageError
from nvcomm.group import local_groups
from stress import __main__ as command
from stress import gpu_runners, processes, report
from stress.decode import BadWord, Origin
from stress.gpu_facts import last_seen, merge_facts
from stress.hang import Hang, Position, Wait
from stress.ledger import LedgerReading
from stress.run import FIRST_GENERATION, RunConfig
from tests.unit.stress_outcomes import WRONG
from tests.unit.stress_outcomes import outcome as seen


def facts(**changes) -> dict:
    clean = {"slot": 0, "generation": FIRST_GENERATION + 24, "dirty_words": 0}
    usual = {
        **{"replays": [8], "gathers": [24], "bad_words": 0, "firsts": [], "reason": None},
        **{"waits": [], "positions": [], "audits": [clean], "stats": [{"calls": 24}]},
    }
    return usual | changes


def test_all_went_well():
    outcome = merge_facts([facts(), facts()], 2, 8, 1.5)
    assert (outcome.replays, outcome.gathers, outcome.bad_words, outcome.seconds) == (8, 24, 0, 1.5)
    assert (outcome.audit, outcome.hang, outcome.first_bad) == ((), None, None)
    assert outcome.stats == ({"calls": 24}, {"calls": 24})


def test_the_earliest_stale_word_is_shown():
    def bad(rank: int, replay: int, kind: str) -> dict:
        return BadWord(rank, Origin(0, 0, replay, 0), 1, 2, kind, None).as_json()

    outcome = merge_facts(
        [facts(bad_words=2, firsts=[bad(0, 3, "early")]), facts(bad_words=5, firsts=[bad(1, 6, "stale")])], 2, 8, 1.0
    )
    assert outcome.bad_words == 7
    assert outcome.first_bad.dst_rank == 1


def test_a_rank_that_counts_fewer_replays_fails_the_audit():
    outcome = merge_facts([facts(), facts(replays=[7])], 2, 8, 1.0)
    assert outcome.audit == ("launched 8 replays, but rank 1 counts 7",)
    unequal = facts(audits=[{"slot": 1, "generation": 25, "dirty_words": 0}])
    assert len(merge_facts([facts(), unequal], 2, 8, 1.0).audit) == 2


def test_a_rank_whose_facts_are_missing_fails_the_audit():
    assert len(merge_facts([facts()], 2, 8, 1.0).audit) == 3


def test_a_hang_keeps_every_rank_that_waited():
    wait = dataclasses.asdict(Wait(0, 1, 7, 1, 0, 1.0, 1))
    position = dataclasses.asdict(Position(1, 3, 0))
    outcome = merge_facts(
        [facts(reason="stuck", waits=[wait]), facts(reason="late", positions=[position])], 2, None, 0.0
    )
    assert outcome.hang.reason == "stuck"
    assert outcome.hang.root_ranks == (1,)
    assert outcome.hang.positions == (Position(1, 3, 0),)
    assert outcome.audit == ()


def together(*calls):
    """Runs the calls at once, as the processes of a world do; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_processes_agree_and_tell_each_other_what_they_saw():
    groups = local_groups(2)

    def process(rank: int):
        others = processes.Others(groups[rank], "run1", 1.0)
        return others.agree(rank == 1), others.agree(False), others.gather(facts(bad_words=rank))

    first, second = together(lambda: process(0), lambda: process(1))
    assert first[:2] == second[:2] == (True, False)
    assert first[2] == second[2]
    assert [fact["bad_words"] for fact in first[2]] == [0, 1]


def test_a_run_that_ranks_left_at_different_places_does_not_spoil_the_next():
    groups = local_groups(2)

    def process(rank: int):
        for name in ("run1", "run2"):
            others = processes.Others(groups[rank], name, 1.0)
            if name == "run2" or rank == 0:
                # Rank 1 leaves run 1 without asking: rank 0 notices, within the timeout.
                with pytest.raises(GroupError) if name == "run1" else contextlib.nullcontext():
                    others.agree(False)
            told = others.gather(facts(bad_words=rank))
        return told

    for told in together(lambda: process(0), lambda: process(1)):
        assert [fact["bad_words"] for fact in told] == [0, 1]


def test_a_process_that_is_gone_makes_it_a_hang(monkeypatch):
    groups = local_groups(2)
    others, _ = together(*[lambda group=group: processes.Others(group, "run1", 1.0) for group in groups])
    monkeypatch.setattr(processes, "MEET_S", 0.3)
    outcome = merge_facts(others.gather(facts()), 2, 8, 1.0)
    assert outcome.hang is not None
    assert "rank 1" in outcome.hang.reason


def test_a_run_that_stands_still_keeps_the_wrong_words_of_the_last_look():
    bad = BadWord(1, Origin(0, 0, 9, 0), 1, 2, "stale", None)

    class Rank:
        def __init__(self, reading: LedgerReading, bad: BadWord | None) -> None:
            self.reading, self.first_bad = (lambda: reading), (lambda: bad)

    ranks = [Rank(LedgerReading(12, 36, 0, None), None), Rank(LedgerReading(11, 33, 4, None), bad)]
    outcome = last_seen(ranks, Hang("stuck"))
    assert (outcome.replays, outcome.gathers, outcome.bad_words, outcome.first_bad) == (11, 33, 4, bad)
    assert report.Report(CONFIG, outcome, None, {}).exit_code == report.EXIT_BAD


CONFIG = RunConfig("peer", "auto", "mailbox", "all_gather", 2, 1, 10, None, 1.0)


def agreed(monkeypatch, *configs: RunConfig):
    """What each process makes of the config it was started with."""
    waiting = iter(local_groups(2))
    monkeypatch.setattr(gpu_runners.groups, "from_environment", lambda: next(waiting))
    runners = [gpu_runners.PeerRunner("cuda", print) for _ in configs]

    def ask(runner, config):
        try:
            return runner.agreed(config)
        except UsageError as error:
            return error

    return together(*[lambda pair=pair: ask(*pair) for pair in zip(runners, configs, strict=True)])


def test_processes_that_drew_seeds_of_their_own_take_rank_0s(monkeypatch):
    assert agreed(monkeypatch, CONFIG, CONFIG.but(seed=2)) == [CONFIG, CONFIG]


def test_processes_that_were_started_for_different_runs_say_so(monkeypatch):
    errors = agreed(monkeypatch, CONFIG, CONFIG.but(op="mixed"))
    assert [str(error) for error in errors] == [str(errors[0])] * 2
    assert "ranks [1] were started with other arguments" in str(errors[0])


def test_the_watchdogs_report_tells_of_the_control_that_ran(monkeypatch, tmp_path):
    class Stuck:
        """A run in which the control ends, and the watchdog has to end the rest."""

        reports = True

        def __init__(self, device, on_hang):
            self._on_hang = on_hang

        def agreed(self, config):
            return config

        def run(self, config, progress):
            if config.protocol == "late-copy":
                return WRONG
            raise SystemExit(self._on_hang(config, seen(hang=Hang("no progress"))))

        def close(self):
            pass

    monkeypatch.setattr(gpu_runners, "device_of", lambda local_rank: None)
    monkeypatch.setattr(gpu_runners, "VirtualRunner", Stuck)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        command.main(["--world", "virtual", "--replays", "8", "--json", str(path)])
    assert ended.value.code == report.EXIT_HANG
    result = json.loads(path.read_text())
    assert (result["hang"]["reason"], result["control"]["failed_as_it_must"]) == ("no progress", True)
