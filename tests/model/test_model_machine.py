# SPDX-License-Identifier: Apache-2.0
"""The explorer itself: its arithmetic is nvcomm.mailbox's, its shortcuts change no verdict, its command line fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvcomm import mailbox
from nvcomm.mailbox import MailboxLayout
from nvcomm.reference import mailbox_model, model_table
from nvcomm.reference.model_machine import Machine
from nvcomm.reference.model_plan import Plan, Scenario
from nvcomm.reference.model_rules import PROTOCOL, Verdict, without
from nvcomm.reference.model_search import explore, narrate, walk
from nvcomm.reference.model_traffic import Call, gathers

EVEN = Scenario(2, gathers(1, 1, 1, 1))

# Every order of these takes more than 5,000 states: seconds, not worth the repetition.
WIDE = {"R1-clears-2", "R1-clears-3", "R1-clears-3-late", "R2-audit", "A2", "reset-timeout", "reset-marked"}
WIDE |= {"R10b-no-drain", "R10b-marked-no-barrier-2", "late-copy-even", "late-copy-fixed-even", "clear-next-even"}
WIDE |= {"skip-own-packed-even", "R10b-marked-no-blank", "R10b-marked-no-barrier-1"}


def test_next_slot_comes_from_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a next_slot that stays where it is, two slots are one."""
    assert explore(Machine(EVEN)).verdict == Verdict.OK
    monkeypatch.setattr(mailbox, "next_slot", lambda slot: slot)
    assert explore(Machine(EVEN)).verdict == Verdict.STALE


def test_number_of_slots_comes_from_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default follows nvcomm.mailbox, and a scenario's own number reaches its arithmetic and is gone after."""
    assert PROTOCOL.num_slots == mailbox.NUM_SLOTS
    for num_slots in (1, 2, 3):
        plan = Plan(replace(EVEN, rules=without(num_slots=num_slots)))
        assert plan.next_slot == tuple((slot + 1) % num_slots for slot in range(num_slots))
        assert PROTOCOL.num_slots == mailbox.NUM_SLOTS
    monkeypatch.setattr(mailbox, "NUM_SLOTS", 5)
    with pytest.raises(ZeroDivisionError):
        Plan(replace(EVEN, rules=without(num_slots=0)))
    assert mailbox.NUM_SLOTS == 5


def test_generation_comes_from_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that does not wrap shows in the state blocks, and slots modulo it then differ."""
    modulo = Scenario(2, gathers(1, 1, 1, 1), without(num_slots=3, slot_from="generation"))
    assert explore(Machine(modulo)).verdict == Verdict.STALE
    monkeypatch.setattr(mailbox, "next_generation", lambda generation: generation + 1)
    assert explore(Machine(modulo)).verdict == Verdict.OK


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda self, slot, src_rank: slot * self.slot_bytes, id="all rows in one place"),
        pytest.param(lambda self, slot, src_rank: src_rank * self.row_bytes, id="all slots in one place"),
        pytest.param(lambda self, slot, src_rank: (slot + src_rank) * self.row_bytes, id="slots overlap"),
    ],
)
def test_rows_come_from_the_mailbox(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.setattr(MailboxLayout, "row_offset", broken)
    assert explore(Machine(EVEN)).verdict in (Verdict.STALE, Verdict.LOST)


def test_records_come_from_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    escaping = Scenario(2, gathers(1, 1, 1, escapes=frozenset({0})))
    assert explore(Machine(escaping)).verdict == Verdict.OK
    right = MailboxLayout.record_offset
    monkeypatch.setattr(MailboxLayout, "record_offset", lambda self, slot, row, record: right(self, 0, row, record))
    assert explore(Machine(escaping)).verdict == Verdict.STALE


def _small() -> list[model_table.Configuration]:
    chosen = [c for c in model_table.configurations() if isinstance(c, model_table.Configuration)]
    return [c for c in chosen if c.setting == "2 x 1" and not (c.slow or c.walks or c.full or c.name in WIDE)]


@pytest.mark.parametrize("configuration", _small(), ids=lambda c: c.name)
def test_left_out_orders_change_no_verdict(configuration: model_table.Configuration) -> None:
    """The reduced machine and the full one find the same, and the full one sees more states."""
    for scenario in configuration.scenarios:
        reduced, full = (explore(Machine(scenario, reduced=r), max_states=20_000) for r in (True, False))
        assert full.verdict == reduced.verdict
        if full.verdict == Verdict.OK:
            assert full.states >= reduced.states


@pytest.mark.parametrize(("op", "world_size"), [("gather", 3), ("two_shot", 3), ("gather", 2)])
def test_symmetry_changes_no_verdict(op: str, world_size: int) -> None:
    calls = tuple(Call(op, (1,)) for _ in range(3 if world_size == 2 else 2))
    for rules in (PROTOCOL, without(num_slots=1)):
        machine = Machine(Scenario(world_size, calls, rules))
        plain, counted_once = explore(machine), explore(machine, symmetry=True)
        assert plain.verdict == counted_once.verdict
        assert counted_once.states < plain.states


def test_uneven_calls_are_not_symmetric() -> None:
    assert not list(Plan(Scenario(2, (Call("gather", (1, 2)),))).symmetries())
    assert len(list(Plan(Scenario(3, gathers(1))).symmetries())) == 5


def test_a_trace_replays() -> None:
    machine = Machine(replace(EVEN, rules=without(num_slots=1)))
    result = explore(machine)
    story = narrate(machine, result.trace)
    assert story[-1] == f"STALE: {result.detail}"
    assert narrate(machine, result.trace) == story


def test_walks_repeat_with_their_seed() -> None:
    machine = Machine(replace(EVEN, rules=without(num_slots=1)))
    first, again = walk(machine, 5, seed=3), walk(machine, 5, seed=3)
    assert (first.verdict, first.trace) == (again.verdict, again.trace)
    assert first.verdict != Verdict.OK


def test_too_many_states_is_an_error() -> None:
    with pytest.raises(MemoryError, match="larger max_states"):
        explore(Machine(EVEN), max_states=10)


def test_command_line_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert mailbox_model.main(["R6"]) == 0
    printed = capsys.readouterr().out
    assert "R6-modulo-3" in printed
    assert "3 configurations searched" in printed
    assert mailbox_model.main(["R6", "--markdown"]) == 0
    assert "| R6-host | R6 | slot_from=host | 2 x 1 | reduced | STALE |" in capsys.readouterr().out


def test_command_line_fails_on_another_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tuple(replace(c, expected=Verdict.OK) for c in model_table.configurations() if c.name == "R6-host")
    monkeypatch.setattr(mailbox_model, "configurations", lambda: wrong)
    assert mailbox_model.main([]) == 1
    assert "!! R6-host: expected OK" in capsys.readouterr().out
    assert mailbox_model.main(["--trace", "R6-host"]) == 1


def test_command_line_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert mailbox_model.main(["--trace", "A1"]) == 0
    assert "STALE: rank" in capsys.readouterr().out
    assert mailbox_model.main(["--trace", "no such name"]) == 2
    assert "no such name" in capsys.readouterr().err


def test_a_name_that_nothing_begins_with_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert mailbox_model.main(["R66"]) == 2
    assert "begins with 'R66'" in capsys.readouterr().err


def test_unfinished_searches_are_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert mailbox_model.main(["gather-3-ranks-full"]) == 0
    assert "--all" in capsys.readouterr().out
