# SPDX-License-Identifier: Apache-2.0
"""Each rule of docs/mailbox.md broken on purpose in the host code: the named test has to fail on it."""

from __future__ import annotations

import pytest

from tests import mutation
from tests.host.mutants import MUTANTS

RULES = {"R1", "R2", "R3", "R4", "R5", "R6", "R7", "R10", "R10b", "R11", "R12", "R13"}


def test_every_rule_is_broken_by_some_mutant():
    assert {mutant.rule for mutant in MUTANTS} == RULES


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
def test_it_passes_on_the_code_as_it_is(test):
    result = mutation.run(test)
    assert result.passed, result


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}-{mutant.name}")
def test_it_catches_the_mutant(mutant):
    result = mutation.run_mutant(mutant)
    assert result.caught, result


def test_a_break_that_nobody_sees_is_told_apart(tmp_path):
    """The negative control: a change of a comment is not caught, and a text that is gone is an error."""
    edit = mutation.Edit("nvcomm/host/steps.py", "(R3)", "(R3!)", 2)
    mutant = mutation.Mutant("none", "nothing", (edit,), MUTANTS[3].test)
    assert not mutation.run_mutant(mutant).caught
    with pytest.raises(LookupError, match="0 times, not 1"):
        mutation.run(MUTANTS[3].test, (mutation.Edit("nvcomm/host/steps.py", "no such text", ""),))
    with pytest.raises(LookupError, match="did not run"):
        mutation.run("tests/host/test_rules.py::test_no_such_test")
