# SPDX-License-Identifier: Apache-2.0
"""R8: as many places as the rule counts are always enough, and the count is not idle."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from nvcomm.reference.model_residency import Residency, explore_residency, narrate_residency
from nvcomm.reference.model_rules import Verdict

SETUPS = [
    Residency(0, ranks=ranks, ctas=ctas, groups=groups, early=early, publishers=publishers)
    for ranks, ctas, groups, early, publishers in product((2, 3), (1, 2), (1, 2), (False, True), (0, 1, 2))
    if ranks * ctas * groups <= 4
]
SETUPS += [
    Residency(0, ranks=ranks, ctas=ctas, calls=calls, early=True, wide="plain")
    for ranks, ctas, calls in ((2, 1, 4), (2, 2, 3), (3, 1, 3))
]


def _with(setup: Residency, places: int) -> Residency:
    return replace(setup, places=places)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_R8_places_needed_are_enough(setup: Residency) -> None:
    assert explore_residency(_with(setup, setup.places_needed)).verdict == Verdict.OK


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_R8_too_few_places_deadlock(setup: Residency) -> None:
    assert explore_residency(_with(setup, 1)).verdict == Verdict.DEADLOCK


def test_R8_early_trigger_needs_places_for_dependents() -> None:
    """What was seen on a device: enough for all that spin, and a deadlock as soon as dependents take places."""
    spinning = Residency(4, ranks=2, ctas=2)
    assert spinning.places_needed == 4
    assert explore_residency(spinning).verdict == Verdict.OK
    early = Residency(4, ranks=2, ctas=2, early=True)
    result = explore_residency(early)
    assert result.verdict == Verdict.DEADLOCK
    assert narrate_residency(early, result)[-1].startswith("DEADLOCK: all 4 places")


def test_R8_a_wide_grid_among_early_ones_has_to_be_a_plain_launch() -> None:
    plain = Residency(6, ranks=3, ctas=1, calls=3, early=True, wide="plain")
    assert plain.places_needed == 6
    assert explore_residency(plain).verdict == Verdict.OK
    overlapping = replace(plain, wide="early")
    assert overlapping.places_needed == 9
    assert explore_residency(overlapping).verdict == Verdict.DEADLOCK
    assert explore_residency(replace(overlapping, places=9)).verdict == Verdict.OK
