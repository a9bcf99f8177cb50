# SPDX-License-Identifier: Apache-2.0
"""Every configuration of the protocol explorer ends as docs/model.md says, and each rule switched off fails."""

from __future__ import annotations

import pytest

from nvcomm.reference.model_rules import Verdict
from nvcomm.reference.model_table import Configuration, ResidencyConfiguration, configurations

ALL = configurations()
BY_NAME = {configuration.name: configuration for configuration in ALL}

# Actions of a shortest failing run. A change here means that the protocol or the machine changed.
SHORTEST = {
    "R1i-publish-first-2": 3,
    "R1i-read-first-2": 6,
    "R1ii-early-split-2": 10,
    "R1ii-early-idle-2": 3,
    "R1ii-exit-idle-2": 4,
    "R1ii-block-idle-2": 6,
    "R1i-publish-first-3": 3,
    "R1i-read-first-3": 6,
    "R1ii-early-split-3": 10,
    "R1ii-early-idle-3": 3,
    "R1ii-exit-idle-3": 4,
    "R1ii-block-idle-3": 6,
    "R1-clears-2": 18,
    "R1-clears-3-late": 24,
    "A1": 7,
    "slots-1": 5,
    "slots-1-mixed": 7,
    "slots-1-3-ranks": 6,
    "R2-audit": 20,
    "R2-mixed": 9,
    "R2-R3": 9,
    "R3-next": 19,
    "R3-current-size": 17,
    "R4": 2,
    "R5-raw": 4,
    "R5-kept": 12,
    "R5-shared": 6,
    "R6-host": 5,
    "R6-modulo-3": 11,
    "R7-swapped": 1,
    "R7-overlap": 3,
    "R7-overlap-checked": 1,
    "R10-names-itself": 3,
    "R12-empty-call": 5,
    "R12-broadcast": 6,
    "R12-uneven": 6,
    "R12-reduce-scatter": 2,
    "R12-packed-places": 1,
    "R12-own-by-mailbox": 1,
    "R12-results-skipped": 13,
    "R10b-no-drain": 10,
    "R10b-no-barrier-1": 7,
    "R10b-no-barrier-2": 11,
    "R10b-no-slot": 10,
    "R10b-marked-no-blank": 4,
    "R10b-marked-no-barrier-1": 12,
    "R10b-marked-no-barrier-2": 20,
    "A2": 12,
    "R8-off": 2,
    "R8-off-3-ranks": 3,
    "R8-off-early": 4,
    "R8-off-early-wide": 6,
    "R8-off-split": 4,
    "R8-off-split-early": 6,
    "R8-off-two-communicators": 2,
    "late-copy-shrink": 16,
    "late-copy-grow": 12,
    "clear-next-shrink": 11,
    "clear-next-grow": 8,
    "clear-next-even": 15,
    "clear-next-own-shrink": 23,
    "clear-next-own-grow": 23,
    "clear-next-own-even": 19,
    "clear-next-own-big-small-big": 27,
    "clear-current-big-small-big": 17,
    "skip-own-packed-shrink": 13,
    "skip-own-packed-grow": 11,
    "clear-previous-2-shrink": 21,
    "clear-previous-2-grow": 17,
    "clear-previous-2-even": 17,
    "clear-previous-2-big-small-big": 21,
    "clear-previous-after-2-shrink": 20,
    "clear-previous-after-2-grow": 17,
    "clear-previous-after-2-even": 16,
    "clear-previous-after-2-big-small-big": 21,
    "clear-previous-unlanded-shrink": 15,
    "clear-previous-unlanded-grow": 11,
    "clear-previous-unlanded-even": 11,
    "clear-previous-unlanded-big-small-big": 15,
    "collected-packed-1-shrink": 7,
    "collected-packed-1-grow": 5,
    "collected-packed-1-even": 5,
    "collected-packed-1-big-small-big": 7,
}


def _about(*rules: str) -> pytest.MarkDecorator:
    """The configurations about some rules, those that take minutes on request."""
    chosen = [c for c in ALL if c.rule.split()[0] in rules]
    marked = [pytest.param(c, id=c.name, marks=[pytest.mark.model_all] if c.slow else []) for c in chosen]
    return pytest.mark.parametrize("configuration", marked)


def _holds(configuration: Configuration | ResidencyConfiguration) -> None:
    outcome = configuration.run()
    assert outcome.verdict == configuration.expected, "\n".join(outcome.story)
    assert outcome.states > 0
    if configuration.name in SHORTEST:
        assert outcome.length == SHORTEST[configuration.name], "\n".join(outcome.story)
    if outcome.verdict != Verdict.OK:
        assert outcome.story[-1].startswith(outcome.verdict)


@pytest.mark.timeout(600)
@_about("all")
def test_all_rules_on_no_failure(configuration: Configuration) -> None:
    """Gathers, all-reduces and walks with every rule on."""
    _holds(configuration)


@_about("R1", "A1")
def test_R1_no_publish_before_the_clears(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R2", "R2+R3")
def test_R2_own_row_is_collected(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R3")
def test_R3_fixed_rows_and_clear_what_was_collected(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R4")
def test_R4_the_atom_is_a_word(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R5")
def test_R5_reserved_words_do_not_travel(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R6")
def test_R6_slot_lives_on_the_device(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R7")
def test_R7_one_order(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R8")
def test_R8_nobody_starves(configuration: ResidencyConfiguration) -> None:
    _holds(configuration)


@_about("R10")
def test_R10_death_ends_in_a_report(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R10b", "A2")
def test_R10b_reset(configuration: Configuration) -> None:
    _holds(configuration)


@_about("R12")
def test_R12_everybody_waits_for_everybody(configuration: Configuration) -> None:
    _holds(configuration)


@_about("slots")
def test_one_slot_is_not_enough(configuration: Configuration) -> None:
    _holds(configuration)


@pytest.mark.timeout(600)
@_about("known")
def test_known_protocols(configuration: Configuration) -> None:
    """What earlier searches found about other libraries' protocols comes out again."""
    _holds(configuration)


def test_every_configuration_belongs_to_a_test() -> None:
    rules = {"all", "known", "slots", "A1", "A2", "R2+R3", "R10b", *(f"R{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12))}
    assert {c.rule.split()[0] for c in ALL} == rules
    assert len(BY_NAME) == len(ALL), "names are unique"


RULES = ["R1 i", "R1 ii", "R1", "R3", "R4", "R5", "R6", "R7", "R8", "R10", "R10b", "R12", "A1", "A2", "slots"]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_failure(rule: str) -> None:
    """A rule that can be switched off without harm proves nothing."""
    assert any(c.expected != Verdict.OK for c in ALL if c.rule == rule)


def test_R2_and_R3_guard_each_other() -> None:
    """Each off alone is harmless, both off are not: the late-copy gather."""
    alone = [BY_NAME["R2"], BY_NAME["R3-packed"]]
    assert [c.expected for c in alone] == [Verdict.OK, Verdict.OK]
    assert BY_NAME["R2-R3"].expected == Verdict.STALE


def test_every_negative_asserts_its_shortest_failure() -> None:
    """Walks do not find shortest runs, and slow searches are left to `--all`."""
    negatives = {
        c.name
        for c in ALL
        if c.expected != Verdict.OK and not c.slow and not (isinstance(c, Configuration) and c.walks)
    }
    assert negatives == set(SHORTEST)
