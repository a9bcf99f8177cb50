# SPDX-License-Identifier: Apache-2.0
"""What a fault is, how it may end, and the table that is printed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nvcomm.errors import NvcommError, PeerTimeoutError

RANKS = 3
ODD_RANK = 2  # the rank that does what it should not
CALLS_BEFORE = 5  # right ones, before the fault: it happens in generation 5, slot 1
MORE_WORDS = 1_000_000  # compared on every rank once the group works again

AS_BEFORE = "goes on"
RESET = "reset()"
RESET_OR_NOT = "reset() where it is needed"
NEW_GROUP = "reset() raises GroupError, survivors go on in a new group"
UNDEFINED = "undefined"
SUCCESS = "success"

Work = TypeVar("Work", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Ending:
    """How a fault ends, for all ranks that are watched.

    Attributes:
        result: `SUCCESS`, the error's type, or `UNDEFINED`; ranks that differ are listed.
        root: the rank that an error names as the one that did not publish, or -1.
        places: (generation, slot) that errors name, ascending, each once.
        then: what was done to go on, after which `MORE_WORDS` words were right on every rank.
    """

    result: str
    root: int = -1
    places: tuple[tuple[int, int], ...] = ()
    then: str = RESET

    def __str__(self) -> str:
        named = [f"rank {self.root}"] if self.root >= 0 else []
        named += [f"generation {generation}, slot {slot}" for generation, slot in self.places]
        return f"{self.result}{': ' if named else ''}{'; '.join(named)}. Then {self.then}"

    def allows(self, seen: Ending) -> bool:
        """Whether `seen` is what was expected; anything may come of what is undefined, as long as all can go on."""
        return seen == self or (self.result == UNDEFINED and seen.then in (RESET, AS_BEFORE))


@dataclass(frozen=True, slots=True)
class Sight:
    """What one rank saw of a fault.

    Attributes:
        result, root, places, then: as for `Ending`.
        seconds: from the first call that it concerns to the error, or to success.
        problem: what must not be in any case; empty: nothing.
    """

    result: str = SUCCESS
    root: int = -1
    places: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    then: str = ""
    problem: str = ""


def sight_of(error: NvcommError | None, seconds: float) -> Sight:
    """What an error says."""
    if error is None:
        return Sight(seconds=seconds)
    if isinstance(error, PeerTimeoutError):
        place = (error.generation, error.slot)
        return Sight("PeerTimeoutError", error.root_rank, (place,), seconds)
    return Sight(type(error).__name__, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Fault(Generic[Work]):
    """One line of the list.

    Attributes:
        name: what happens, completing "a rank ...".
        expected: how it has to end.
        work: what ranks do; the world that runs it says what it is called with.
        watched: the ranks whose ending counts.
        device_checks: whether NVCOMM_DEVICE_CHECKS=1.
        generation: where the communicator's count begins.
        lost: the rank is gone for good.
        continued_after_s: when a rank that stopped itself is continued.
    """

    name: str
    expected: Ending
    work: Work
    watched: tuple[int, ...] = (0, 1)
    device_checks: bool = False
    generation: int = 0
    lost: bool = False
    continued_after_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    expected: Ending
    seen: Ending
    seconds: float
    problems: tuple[str, ...]
    late: bool = False

    @property
    def only_late(self) -> bool:
        """As expected, and nothing was wrong but the time that it took."""
        return self.late and len(self.problems) == 1 and self.expected.allows(self.seen)

    @property
    def good(self) -> bool:
        """As expected, in time, and nothing else was wrong."""
        return self.expected.allows(self.seen) and not self.problems


def row_of(fault: Fault[Work], sights: Sequence[Sight], timeout_s: float) -> Row:
    """The line for what the ranks saw, rank r's at index r."""
    watched = [sights[rank] for rank in fault.watched]
    problems = [f"rank {rank}: {sight.problem}" for rank, sight in enumerate(sights) if sight.problem]
    seconds = max(sight.seconds for sight in watched)
    late = seconds > timeout_s + 1
    if late:
        problems.append(f"it took {seconds:.2f} s; wanted at most {timeout_s + 1:.1f} s")
    places = tuple(sorted({place for sight in watched for place in sight.places}))
    roots = {sight.root for sight in watched}
    seen = Ending(
        _one([sight.result for sight in watched], fault.watched),
        roots.pop() if len(roots) == 1 else -1,
        places,
        _one([sight.then for sight in watched], fault.watched),
    )
    if roots and fault.expected.result != UNDEFINED:
        problems.append(f"ranks name different roots: {[sight.root for sight in watched]}")
    return Row(fault.name, fault.expected, seen, seconds, tuple(problems), late)


def markdown(rows: Iterable[Row]) -> str:
    """The table of docs/reliability.md."""
    lines = ["| a rank ... | expected | seen | seconds |", "|---|---|---|---|"]
    for row in rows:
        seen = "as expected" if row.seen == row.expected else str(row.seen)
        seen = "; ".join((seen, *row.problems))
        lines.append(f"| {row.name} | {row.expected} | {seen} | {row.seconds:.2f} |")
    return "\n".join(lines)


def _one(values: Sequence[str], ranks: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True))
