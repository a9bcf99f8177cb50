# SPDX-License-Identifier: Apache-2.0
"""The configurations: what is searched, with which rules off, and what has to come out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from nvcomm.reference import model_rules as r
from nvcomm.reference.model_machine import Machine
from nvcomm.reference.model_plan import Scenario
from nvcomm.reference.model_residency import Residency, explore_residency, narrate_residency
from nvcomm.reference.model_rules import PROTOCOL, Rules, Verdict, rules_off, without
from nvcomm.reference.model_search import explore, narrate, walk
from nvcomm.reference.model_traffic import Call, gathers

OK, STALE, TORN, LOST = Verdict.OK, Verdict.STALE, Verdict.TORN, Verdict.LOST
DEADLOCK, DIRTY, OVERLAP = Verdict.DEADLOCK, Verdict.DIRTY, Verdict.OVERLAP


SEED = 2026


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration came to.

    Args:
        verdict: what was found.
        detail: what went wrong, in words.
        states: different states seen; with walks, actions taken.
        seconds: processor time.
        length: actions of the failing trace; a shortest one, except with walks.
        story: the failing trace, a line for everything that happens.
    """

    verdict: Verdict
    detail: str
    states: int
    seconds: float
    length: int
    story: list[str]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One line of the table.

    Args:
        name: what to call it on the command line.
        rule: the rule of docs/mailbox.md that it is about.
        scenarios: searched one after the other; the first failure ends it.
        expected: the verdict that has to come out.
        note: why that is the right verdict, where it is not plain.
        full: search without leaving out any order.
        symmetry: count states that differ by a renumbering of the ranks once.
        walks: seeded random walks instead of a search; how many.
        slow: not part of the run that fits into a minute.
    """

    name: str
    rule: str
    scenarios: tuple[Scenario, ...]
    expected: Verdict
    note: str = ""
    full: bool = False
    symmetry: bool = False
    walks: int = 0
    slow: bool = False

    @property
    def off(self) -> str:
        """The rules that are switched off."""
        return rules_off(self.scenarios[0].rules)

    @property
    def setting(self) -> str:
        """Ranks and words."""
        words = max(max((c.extent for c in s.calls), default=0) for s in self.scenarios)
        return f"{self.scenarios[0].world_size} x {words}"

    @property
    def method(self) -> str:
        """How it is searched."""
        how = f"{self.walks} walks" if self.walks else "full" if self.full else "reduced"
        return how + (", symmetry" if self.symmetry else "") + (", on request" if self.slow else "")

    def run(self) -> Outcome:
        """Search; states and seconds are added up over the scenarios."""
        states, begun = 0, time.process_time()
        for scenario in self.scenarios:
            machine = Machine(scenario, reduced=not self.full)
            result = walk(machine, self.walks, SEED) if self.walks else explore(machine, symmetry=self.symmetry)
            states += result.states
            if result.verdict != OK:
                break
        story = narrate(machine, result.trace) if result.verdict != OK else []
        return Outcome(result.verdict, result.detail, states, time.process_time() - begun, len(result.trace), story)


@dataclass(frozen=True, slots=True)
class ResidencyConfiguration:
    """One line of the table about R8: who is resident."""

    name: str
    setup: Residency
    expected: Verdict
    note: str = ""
    rule: str = "R8"
    slow: bool = False
    method: str = "residency"

    @property
    def off(self) -> str:
        """Whether everything that may spin fits."""
        fits = self.setup.places >= self.setup.places_needed
        return "-" if fits else f"{self.setup.places} places, {self.setup.places_needed} needed"

    @property
    def setting(self) -> str:
        """Ranks and CTAs."""
        return f"{self.setup.groups * self.setup.ranks} x {self.setup.ctas}"

    def run(self) -> Outcome:
        """Search."""
        result = explore_residency(self.setup)
        story = narrate_residency(self.setup, result) if result.verdict != OK else []
        return Outcome(result.verdict, result.detail, result.states, result.seconds, len(result.trace), story)


def _one(
    name: str, rule: str, expected: Verdict, calls: tuple[Call, ...], rules: Rules = PROTOCOL, *, world_size: int = 2,
    note: str = "", full: bool = False, symmetry: bool = False, walks: int = 0, slow: bool = False,
    timeouts: str = "none", mortal: tuple[int, ...] = (), audit: bool = True,
) -> Configuration:  # fmt: skip
    scenario = Scenario(world_size, calls, rules, timeouts, frozenset(mortal), audit)
    return Configuration(name, rule, (scenario,), expected, note, full, symmetry, walks, slow)


def _many(
    name: str, rule: str, expected: Verdict, programs: Iterator[tuple[Call, ...]], rules: Rules = PROTOCOL, *,
    note: str = "", world_size: int = 2, symmetry: bool = False, slow: bool = False, timeouts: str = "none",
    mortal: tuple[int, ...] = (),
) -> Configuration:  # fmt: skip
    scenarios = tuple(Scenario(world_size, calls, rules, timeouts, frozenset(mortal)) for calls in programs)
    return Configuration(name, rule, scenarios, expected, note, symmetry=symmetry, slow=slow)


def two_shots(*items: int) -> tuple[Call, ...]:
    """Two-shot all-reduces."""
    return tuple(Call("two_shot", (n,)) for n in items)


def _programs(length: int, sizes: tuple[int, ...]) -> Iterator[tuple[Call, ...]]:
    return (gathers(*program) for program in product(sizes, repeat=length))


def _mixtures(length: int, size: int) -> Iterator[tuple[Call, ...]]:
    ops = (gathers(size)[0], two_shots(size)[0], Call("reduce_scatter", (1,)), Call("broadcast", (1,)))
    return product(ops, repeat=length)


EVEN, SHRINK, GROW = gathers(1, 1, 1, 1), gathers(2, 1, 1, 1), gathers(1, 1, 1, 2)
BIG_SMALL_BIG = gathers(2, 1, 1, 2)
RESET_CALL = Call("reset", ())
UNEVEN = (Call("gather", (2, 0)), Call("gather", (0, 1)), Call("gather", (1, 2)), Call("gather", (0, 1)))
LATE_COPY = without(num_slots=3, own_row=False, rows="packed", clear="previous", grids=r.CLEAR_FIRST)
ESCAPES = (
    *gathers(2, escapes=frozenset({0})), *gathers(1, escapes=frozenset({0, 1})), *gathers(2),
    *gathers(1, escapes=frozenset({1})),
)  # fmt: skip
ESCAPE_AGAIN = gathers(1, 1, 1, escapes=frozenset({0}))


def _protocol() -> Iterator[Configuration]:
    """All rules on: no failure."""
    yield _many("gather", "all", OK, _programs(4, (0, 1, 2)), note="every program of 4 gathers of 0, 1 or 2 words")
    yield _many("gather-5", "all", OK, _programs(5, (1, 2)), note="every program of 5 gathers of 1 or 2 words")
    yield _one("gather-full", "all", OK, gathers(1, 1, 1, 1, 1), full=True)
    yield _one("gather-full-2-words", "all", OK, gathers(1, 2, 1), full=True, slow=True)
    yield _one("gather-3-slots", "all", OK, gathers(2, 1, 2, 1, 2), without(num_slots=3))
    yield _one("gather-3-ranks", "all", OK, gathers(1, 1, 1, 1, 1), world_size=3, symmetry=True)
    yield _one("gather-3-ranks-2-words", "all", OK, gathers(2, 1, 2), world_size=3, symmetry=True, slow=True)
    yield _one("gather-3-ranks-full", "all", OK, gathers(1, 1), world_size=3, symmetry=True, full=True, slow=True)
    yield _one("gather-4-ranks", "all", OK, gathers(1, 1, 1), world_size=4, symmetry=True, slow=True)
    yield _one("all-reduce-ll", "all", OK, gathers(2, 2, 2, 2, 2), note="LL: the same words as an even gather")
    yield _one("uneven", "R12", OK, UNEVEN, note="who has nothing to send sends a token")
    yield _one("two-shot", "R12", OK, two_shots(2, 1, 2, 1), note="two items, one, two, one")
    yield _one("two-shot-full", "R12", OK, two_shots(1, 1, 1, 1), full=True)
    yield _one("two-shot-3-ranks", "R12", OK, two_shots(1, 1, 1), world_size=3, symmetry=True)
    yield _one("two-shot-3-owners", "R12", OK, two_shots(3, 3), world_size=3)
    yield _many("mixed", "R12", OK, _mixtures(3, 2), note="gather, two-shot, reduce-scatter, broadcast in any order")
    yield _one("broadcast", "R12", OK, (Call("broadcast", (2,)),) * 4, note="the others send tokens")
    yield _one("escape", "R5", OK, ESCAPES)
    yield _one("escape-3-ranks", "R5", OK, ESCAPE_AGAIN, world_size=3)
    yield _one("pdl", "R1", OK, EVEN, without(grids=r.PDL, pdl=True, between=r.IDLE))
    yield _one("pdl-2-words", "R1", OK, gathers(2, 1, 2), without(grids=r.PDL, pdl=True, between=r.IDLE))
    yield _one("pdl-3-ranks", "R1", OK, gathers(1, 1, 1), without(grids=r.PDL, pdl=True, between=r.IDLE), world_size=3)
    yield _one("pdl-split", "R1", OK, EVEN, without(grids=r.PDL_SPLIT, pdl=True, between=r.IDLE))
    yield _one("pdl-split-2-words", "R1", OK, gathers(2, 1, 2), without(grids=r.PDL_SPLIT, pdl=True, between=r.IDLE))
    yield _one("pdl-early", "R1 iii", OK, EVEN, without(grids=r.PDL_EARLY, pdl=True))
    yield _one("pdl-early-2-words", "R1 iii", OK, gathers(2, 1, 2), without(grids=r.PDL_EARLY, pdl=True))
    yield _one("pdl-early-polite", "R1 iii", OK, EVEN, without(grids=r.PDL_EARLY, pdl=True, between=r.POLITE))
    yield _one("timeout", "R10", OK, gathers(2, 1, 2), timeouts="any", note="no reset: late words of a call given up")
    yield _one("timeout-3-ranks", "R10", OK, gathers(1, 1), world_size=3, timeouts="any")
    yield _one("death", "R10", OK, gathers(2, 1, 2), timeouts="stuck", mortal=(0, 1))
    yield _one("death-3-ranks", "R10", OK, gathers(1, 1, 1), world_size=3, timeouts="stuck", mortal=(0,))
    yield _one("death-two-shot", "R10", OK, two_shots(2, 2), timeouts="stuck", mortal=(0, 1))
    yield _one("death-two-shot-3-ranks", "R10", OK, two_shots(1, 1), world_size=3, timeouts="stuck", mortal=(0, 1))
    yield _one("reset", "R10b", OK, (*gathers(2, 1), RESET_CALL, *gathers(1, 2)))
    yield _one("reset-3-ranks", "R10b", OK, (*gathers(1), RESET_CALL, *gathers(1)), world_size=3)
    yield _one("reset-timeout", "R10b", OK, (*gathers(1, 1), RESET_CALL, *gathers(1, 1)), timeouts="any",
               note="ranks may be a generation apart")  # fmt: skip
    yield _one("reset-timeout-2-words", "R10b", OK, (*gathers(2, 1), RESET_CALL, *gathers(1, 2)), timeouts="any")
    yield _one("reset-timeout-two-shot", "R10b", OK, (*two_shots(2, 2), RESET_CALL, *two_shots(2, 2)), timeouts="any")
    yield _one("reset-timeout-3-ranks", "R10b", OK, (*gathers(1), RESET_CALL, *gathers(1)), world_size=3,
               timeouts="any", slow=True)  # fmt: skip
    marked = without(reset=r.RESET_MARKED, in_order=True)
    yield _one("reset-marked", "R10b", OK, (*gathers(1), RESET_CALL, *gathers(1)), marked, timeouts="any")
    yield _one("reset-marked-full", "R10b", OK, (RESET_CALL, *gathers(1)), marked, full=True)
    yield _one("reset-marked-2-words", "R10b", OK, (RESET_CALL, *gathers(2)), marked)
    yield _one("reset-marked-3-ranks", "R10b", OK, (RESET_CALL, *gathers(1)), marked, world_size=3)
    yield _one("walk-4-ranks", "all", OK, gathers(2, 1, 2, 1, 1), world_size=4, walks=100)
    yield _one("walk-8-ranks", "all", OK, gathers(1, 2, 1, 1), world_size=8, walks=10)
    yield _one("walk-8-two-shot", "all", OK, two_shots(8, 4, 8), world_size=8, walks=20)
    mixed = (*gathers(1), *two_shots(4), Call("reduce_scatter", (4,)), Call("broadcast", (1,)))
    yield _one("walk-4-mixed", "R12", OK, mixed, world_size=4, walks=100)
    yield _one("walk-8-escape", "R5", OK, ESCAPES, world_size=8, walks=10)
    yield _one("walk-8-pdl", "R1", OK, gathers(1, 2, 1), without(grids=r.PDL, pdl=True, between=r.IDLE), world_size=8,
               walks=10)  # fmt: skip
    yield _one("walk-8-death", "R10", OK, gathers(2, 1, 2), world_size=8, walks=20, timeouts="stuck", mortal=(3,))
    for ranks, walks in ((4, 100), (8, 10)):
        yield _one(f"walk-{ranks}-reset", "R10b", OK, (*gathers(2, 1), RESET_CALL, *gathers(1, 2)), world_size=ranks,
                   walks=walks, timeouts="any")  # fmt: skip
    yield _one("walk-8-ranks-long", "all", OK, gathers(1, 2, 1, 2, 2, 1), world_size=8, walks=100, slow=True)
    yield _one("walk-4-ranks-long", "all", OK, gathers(2, 1, 2, 1, 2, 1), world_size=4, walks=1000, slow=True)


def _pdl_off() -> Iterator[Configuration]:
    """R1 off."""
    for slots in (2, 3):
        pdl = without(num_slots=slots, pdl=True)
        calls = gathers(*[1] * (slots + 2))
        idle = replace(pdl, between=r.IDLE)
        yield _one(f"R1i-publish-first-{slots}", "R1 i", STALE, calls, replace(pdl, grids=r.PDL_PUBLISH_FIRST))
        yield _one(f"R1i-read-first-{slots}", "R1 i", STALE, calls, replace(pdl, grids=r.PDL_READ_FIRST))
        yield _one(f"R1ii-early-split-{slots}", "R1 ii", LOST, calls, replace(pdl, grids=r.PDL_SPLIT_EARLY))
        yield _one(f"R1ii-early-idle-{slots}", "R1 ii", STALE, calls, replace(idle, grids=r.PDL_EARLY))
        yield _one(f"R1ii-exit-idle-{slots}", "R1 ii", STALE, calls, replace(idle, grids=r.PDL_UNFENCED))
        yield _one(f"R1ii-block-idle-{slots}", "R1 ii", STALE, calls, replace(idle, grids=r.PDL_FENCED_EARLY))
    yield _one("R1i-late-trigger", "R1 i", OK, EVEN, without(pdl=True, between=r.IDLE, grids=r.PDL_READ_FIRST_FENCED),
               note="redundant while every grid triggers behind its fence (ii)")  # fmt: skip
    yield _one("R1ii-split", "R1 ii", OK, EVEN, without(pdl=True, grids=r.PDL_SPLIT_LATE),
               note="no foreign kernel, and every mailbox grid waits")  # fmt: skip
    yield _one("R1-clears-2", "R1", LOST, EVEN, without(clears_land=1), note="clears landed a call too late")
    yield _one("R1-clears-3", "R1", OK, gathers(1, 1, 1, 1, 1), without(clears_land=1, num_slots=3),
               note="g + NUM_SLOTS - 1 is one call later with 3 slots")  # fmt: skip
    yield _one("R1-clears-3-late", "R1", LOST, gathers(1, 1, 1, 1, 1), without(clears_land=2, num_slots=3))


def _rules_off() -> Iterator[Configuration]:
    """One rule off, or the pair that guards each other."""
    skipping = (replace(gathers(1)[0], skips_own=True), *gathers(1, 1))
    yield _one("A1", "A1", STALE, EVEN, without(clears_land=None), note="clears may land after the grid's completion")
    yield _one("slots-1", "slots", STALE, EVEN, without(num_slots=1))
    yield _one("slots-1-mixed", "slots", STALE, gathers(2, 1), without(num_slots=1))
    yield _one("slots-1-3-ranks", "slots", STALE, gathers(1, 1), without(num_slots=1), world_size=3)
    yield _one("slots-1-walk-4", "slots", STALE, EVEN, without(num_slots=1), world_size=4, walks=30)
    yield _one("slots-1-walk-8", "slots", STALE, EVEN, without(num_slots=1), world_size=8, walks=30)
    yield _one("R2", "R2", OK, SHRINK, without(own_row=False), audit=False,
               note="redundant while rows are fixed (R3) and no call skips a row that another collects")  # fmt: skip
    yield _one("R2-audit", "R2", DIRTY, EVEN, without(own_row=False), note="but the mailbox audit sees it")
    yield _one("R2-mixed", "R2", STALE, skipping, note="one operation skips the own row, another collects it")
    yield _one("R2-R3", "R2+R3", STALE, gathers(2, 1, 1, 1), without(own_row=False, rows="packed"), audit=False)
    yield _one("R3-packed", "R3", OK, BIG_SMALL_BIG, without(rows="packed"),
               note="redundant while the own row is collected (R2)")  # fmt: skip
    yield _one("R3-next", "R3", LOST, EVEN, without(clear="next", grids=r.CLEAR_FIRST, num_slots=3))
    yield _one("R3-current-size", "R3", STALE, BIG_SMALL_BIG,
               without(clear="previous by current size", grids=r.CLEAR_FIRST, num_slots=3))  # fmt: skip
    yield _one("R4", "R4", TORN, gathers(2), without(atom="chunk"), note="the last word of a chunk speaks for all")
    yield _one("R5-raw", "R5", LOST, ESCAPE_AGAIN, without(escape="raw"), note="the payload word is EMPTY itself")
    yield _one("R5-kept", "R5", STALE, ESCAPE_AGAIN, without(escape="kept"), note="records are not cleared")
    yield _one("R5-shared", "R5", STALE, ESCAPE_AGAIN, without(escape="shared"), note="one area for all slots")
    yield _one("R6-host", "R6", STALE, EVEN, without(slot_from="host"), note="a slot frozen into a graph")
    yield _one("R6-modulo-2", "R6", OK, EVEN, without(slot_from="generation"), note="2 divides 2**32")
    yield _one("R6-modulo-3", "R6", STALE, EVEN, without(slot_from="generation", num_slots=3),
               note="slot 0 twice at the wrap")  # fmt: skip
    yield _one("R7-swapped", "R7", STALE, gathers(1, 1), without(order="swapped"), note="ranks disagree on the order")
    yield _one("R7-overlap", "R7", STALE, gathers(1, 1), without(order="overlap"), note="two streams, no event")
    yield _one("R7-overlap-checked", "R7", OVERLAP, gathers(1, 1), without(order="overlap", grids=r.CHECKED),
               note="the busy word reports it")  # fmt: skip
    yield _one("R10-names-itself", "R10", Verdict.MISNAMED, two_shots(2), without(report="any word"), timeouts="stuck",
               mortal=(0, 1), note="an owner reports its own result, which waits for the dead rank")  # fmt: skip
    yield _one("R12-empty-call", "R12", STALE, gathers(1, 0, 1), without(empty_call="advances"))
    yield _one("R12-broadcast", "R12", STALE, (Call("broadcast", (1,)),) * 3, without(tokens=False))
    yield _one("R12-uneven", "R12", STALE, (Call("gather", (1, 0)),) * 3, without(tokens=False))
    yield _one("R12-reduce-scatter", "R12", STALE, (Call("reduce_scatter", (1,)),) * 3, without(tokens=False))
    yield _one("R12-packed-places", "R12", STALE, two_shots(2), without(two_shot="packed"))
    yield _one("R12-own-by-mailbox", "R12", STALE, two_shots(1), without(two_shot="own by mailbox"))
    yield _one("R12-results-skipped", "R12", STALE, (*two_shots(2), *gathers(2, 2)),
               without(two_shot="results not collected"))  # fmt: skip


def _reset_off() -> Iterator[Configuration]:
    """R10b off."""
    calls = (*gathers(1), RESET_CALL, *gathers(1))
    twice = (*gathers(1, 1), RESET_CALL, *gathers(1, 1))
    for name, steps, expected in (
        ("no-drain", r.RESET_NO_DRAIN, STALE),
        ("no-barrier-1", r.RESET_NO_BARRIER_1, STALE),
        ("no-barrier-2", r.RESET_NO_BARRIER_2, LOST),
    ):
        yield _one(f"R10b-{name}", "R10b", expected, calls, without(reset=steps), timeouts="any")
    yield _one("R10b-no-slot", "R10b", LOST, twice, without(reset_slot=False), timeouts="any")
    for name, steps, expected in (
        ("marked-no-blank", r.MARKED_NO_BLANK, STALE),
        ("marked-no-barrier-1", r.MARKED_NO_BARRIER_1, LOST),
    ):
        yield _one(f"R10b-{name}", "R10b", expected, calls, without(reset=steps, in_order=True), timeouts="any")
    yield _one("R10b-marked-no-barrier-2", "R10b", LOST, (RESET_CALL, *gathers(1)),
               without(reset=r.MARKED_NO_BARRIER_2, in_order=True))  # fmt: skip
    yield _one("A2", "A2", STALE, calls, without(reset=r.RESET_MARKED, num_slots=1), timeouts="any",
               note="a marker overtakes the word before it; one slot, one call before and one after")  # fmt: skip


def _residency() -> Iterator[ResidencyConfiguration]:
    """R8 on and off: as many places as the rule counts, and the fewest that deadlock."""
    for name, setup in (
        ("R8", Residency(4)),
        ("R8-3-ranks", Residency(6, ranks=3, calls=1)),
        ("R8-early", Residency(8, early=True)),
        ("R8-split", Residency(5, publishers=2)),
        ("R8-split-early", Residency(9, publishers=2, early=True)),
        ("R8-early-plain", Residency(8, early=True, calls=3, wide="plain")),
        ("R8-early-plain-3-ranks", Residency(6, ranks=3, ctas=1, early=True, calls=3, wide="plain")),
        ("R8-two-communicators", Residency(4, groups=2, ctas=1)),
        ("R8-two-communicators-early", Residency(8, groups=2, ctas=1, early=True)),
    ):
        yield ResidencyConfiguration(name, setup, OK)
    for name, setup, note in (
        ("R8-off", Residency(2), "each rank's CTAs spin for chunks that got no place"),
        ("R8-off-3-ranks", Residency(3, ranks=3, calls=1), ""),
        ("R8-off-early", Residency(4, early=True), "enough without the early trigger: dependents take the places"),
        (
            "R8-off-early-wide",
            Residency(6, ranks=3, ctas=1, early=True, calls=3, wide="early"),
            "a grid of twice the CTAs, and not a plain launch",
        ),
        ("R8-off-split", Residency(2, publishers=2), "no place left for one publisher"),
        ("R8-off-split-early", Residency(4, publishers=2, early=True), ""),
        ("R8-off-two-communicators", Residency(2, groups=2, ctas=1), "each communicator alone would fit"),
    ):
        yield ResidencyConfiguration(name, setup, DEADLOCK, note)


def _known() -> Iterator[Configuration]:
    """What other libraries do, as found by earlier searches."""
    programs = {"shrink": SHRINK, "grow": GROW, "even": EVEN, "big-small-big": BIG_SMALL_BIG}
    rows: dict[str, tuple[Rules, tuple[Verdict, ...]]] = {
        "late-copy": (LATE_COPY, (STALE, STALE, OK, OK)),
        "late-copy-own": (replace(LATE_COPY, own_row=True), (OK, OK, OK, OK)),
        "late-copy-fixed": (replace(LATE_COPY, rows="fixed"), (OK, OK, OK, OK)),
        "clear-next": (replace(LATE_COPY, clear="next"), (STALE, STALE, LOST, LOST)),
        "clear-next-own": (replace(LATE_COPY, clear="next", own_row=True), (LOST,) * 4),
        "clear-current": (
            replace(LATE_COPY, clear="previous by current size", own_row=True), (OK, OK, OK, STALE),
        ),
        "skip-own-packed": (replace(LATE_COPY, clear="collected", grids=r.PLAIN), (STALE, STALE, OK, OK)),
        "clear-previous-2": (replace(LATE_COPY, num_slots=2, own_row=True), (LOST,) * 4),
        "clear-previous-after-2": (without(num_slots=2, clear="previous", grids=r.CLEAR_LAST), (LOST,) * 4),
        "clear-previous-after-3": (without(num_slots=3, clear="previous", grids=r.CLEAR_LAST), (OK,) * 4),
        "clear-previous-unlanded": (
            without(num_slots=3, clear="previous", grids=r.CLEAR_LAST, clears_land=None), (STALE,) * 4,
        ),
        "collected-packed-3": (without(num_slots=3, rows="packed"), (OK,) * 4),
        "collected-packed-1": (without(num_slots=1, rows="packed"), (STALE,) * 4),
    }  # fmt: skip
    for name, (rules, verdicts) in rows.items():
        for (program, calls), verdict in zip(programs.items(), verdicts, strict=True):
            yield _one(f"{name}-{program}", "known", verdict, calls, rules, audit=False,
                       slow=name in _WIDE and program == "big-small-big")  # fmt: skip


# Too many states for a minute: copies that nobody collects stay in flight for as long as the search likes.
_WIDE = ("late-copy", "late-copy-fixed", "clear-next")


def configurations() -> tuple[Configuration | ResidencyConfiguration, ...]:
    """The whole table."""
    groups = (_protocol(), _pdl_off(), _rules_off(), _reset_off(), _residency(), _known())
    return tuple(configuration for group in groups for configuration in group)
