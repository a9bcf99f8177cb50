# SPDX-License-Identifier: Apache-2.0
"""The list of faults between processes, as `python -m stress.faults` runs it, and what makes a line of it bad."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from stress.faults import host, host_work, virtual
from stress.faults.__main__ import main
from stress.faults.table import Ending, Fault, Row, Sight, markdown, row_of
from tests import mutation

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the host world runs on x86-64 alone")
TIMED_OUT = Ending("PeerTimeoutError", 2, ((5, 1),))


@pytest.mark.parametrize("fault", host.FAULTS, ids=lambda fault: fault.name)
def test_it_ends_as_it_has_to(fault):
    row = host.run(fault)
    assert row.good, (str(row.seen), str(row.expected), row.problems)


def line(*sights: Sight, expected: Ending = TIMED_OUT) -> Row:
    return row_of(Fault("sleeps", expected, print), [*sights, Sight()], 1.0)


def test_what_makes_a_line_bad():
    """The negative controls of the table: another rank, place or way on, too late, or anything else that was wrong."""
    good = Sight("PeerTimeoutError", 2, ((5, 1),), 1.1, "reset()")
    assert line(good, good).good
    for change in (
        {"result": "success"},
        {"root": 1},
        {"places": ((6, 0),)},
        {"seconds": 2.1},
        {"then": "goes on"},
        {"problem": "mailboxes afterwards"},
    ):
        assert not line(good, replace(good, **change)).good, change
    undefined = Ending("undefined", then="reset() where it is needed")
    assert line(good, replace(good, result="success", root=-1), expected=undefined).good
    assert not line(good, replace(good, then=""), expected=undefined).good


def test_only_a_line_that_is_late_and_nothing_else_is_run_again(monkeypatch):
    """A busy machine makes ranks late; nothing makes them early."""
    good = Sight("PeerTimeoutError", 2, ((5, 1),), 1.1, "reset()")
    late, wrong = replace(good, seconds=2.1), replace(good, seconds=2.1, root=1)
    for sights, runs, is_good in (
        ([good], 1, True),
        ([late, good], 2, True),
        ([late] * 5, 5, False),
        ([wrong], 1, False),
    ):
        left = [line(sight, good) for sight in sights]
        monkeypatch.setattr(host, "_run_once", lambda fault, left=left: left.pop(0))
        assert host.run(host.FAULTS[0]).good is is_good
        assert len(left) == len(sights) - runs == 0


def test_a_program_without_a_fault_does_not_pass_for_one():
    """Nobody is missing here, and the table says so."""
    fault = Fault("calls like the others", TIMED_OUT, host_work.many_calls, generation=0)
    row = host.run(fault)
    assert not row.good
    assert row.seen == Ending("success", then="goes on")


def test_markdown_shows_what_differed():
    good = Sight("PeerTimeoutError", 2, ((5, 1),), 1.1, "reset()")
    text = markdown([line(good, good), line(good, replace(good, root=1))])
    assert "| sleeps | PeerTimeoutError: rank 2; generation 5, slot 1. Then reset() | as expected | 1.10 |" in text
    assert "ranks name different roots: [2, 1]" in text


def test_the_command_line(capsys):
    assert main(["--only", "continued in time", "--markdown"]) == 0
    assert "| is stopped (SIGSTOP) and continued in time |" in capsys.readouterr().out


@pytest.mark.parametrize("command", [main, mutation.main])
def test_a_choice_of_nothing_is_no_success(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--only", "no such thing"])
    assert ended.value.code == 2
    assert "--only 'no such thing'" in capsys.readouterr().err


def test_the_docs_list_every_fault_and_every_mutant():
    """The tables of docs/reliability.md are pasted from a run: with another list they are out of date."""
    from tests.host.mutants import MUTANTS as HOST
    from tests.kernel.mutants import MUTANTS as KERNEL

    lines = (mutation.ROOT / "docs" / "reliability.md").read_text().splitlines()
    for fault in host.FAULTS:
        assert any(line.startswith(f"| {fault.name} | {fault.expected} | ") for line in lines), fault.name
    for fault in virtual.FAULTS:
        assert any(line.startswith(f"| {fault.name} | {fault.expected} |") for line in lines), fault.name
    for mutant in (*HOST, *KERNEL):
        start = f"| {mutant.rule} | {mutant.name} | "
        test = mutant.test.split("/", 2)[2]
        assert any(line.startswith(f"{start}{test} |") for line in lines), mutant.name
        on_cpu = mutant.on_cpu.rpartition("::")[2]
        assert not on_cpu or any(line.startswith(f"{start}{on_cpu} | ") for line in lines), mutant.name
