# SPDX-License-Identifier: Apache-2.0
"""Each rule of docs/mailbox.md broken on purpose in the GPU code: the named test has to fail on it."""

from __future__ import annotations

import pytest

from tests import mutation
from tests.kernel.mutants import MUTANTS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RULES = {*(f"R{number}" for number in range(1, 14)), "R10b"}


def test_every_rule_is_broken_by_some_mutant():
    assert {mutant.rule for mutant in MUTANTS} == RULES


@pytest.mark.parametrize(("test", "widths"), list(dict.fromkeys((m.test, m.widths) for m in MUTANTS)))
def test_it_passes_on_the_code_as_it_is(test, widths):
    result = mutation.run(test, (), widths)
    assert result.passed, result


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}-{mutant.name}")
def test_it_catches_the_mutant(mutant):
    result = mutation.run_mutant(mutant)
    assert result.caught, result
