# SPDX-License-Identifier: Apache-2.0
"""The PTX memory model (PTX ISA 8.10) by brute force, for litmus tests of a few instructions.

Every way in which reads may take values, and every order of the stores to one address, is tried against the axioms
Coherence, SC-per-location and Causality. Left out, as no litmus test here needs them: read-modify-writes, `fence.sc`,
weak accesses, proxies and data dependencies; the parser refuses the first three.

    causality base   (program order, synchronizes-with)+
    causality        base between accesses of one address, or a read from Z's value and Z before it in base
    synchronizes     a release pattern (release store, or fence then store) whose store is read by an acquire pattern
                     (acquire load, or load then fence), if each end's scope covers the other's thread
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = re.compile(r"P(\d+)@cta (\d+),gpu (\d+)")
_CODE = re.compile(r"(ld|st|fence)\.(relaxed|acquire|release|acq_rel)\.(cta|gpu|sys)(?: (\w+), (\w+))?")
_TERM = re.compile(r"(?:P(\d+):)?(\w+) == (\d+)")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """One instruction, or the store that an address begins with.

    Attributes:
        number: index in the program.
        thread: who executes it; -1: nobody, before everything.
        cta, gpu: where.
        kind: "ld", "st" or "fence".
        order: relaxed, acquire, release or acq_rel.
        scope: cta, gpu or sys.
        address: of a load or store.
        value: what is stored; of a load the register's name.
    """

    number: int
    thread: int
    cta: int
    gpu: int
    kind: str
    order: str
    scope: str
    address: str = ""
    value: str = ""

    def covers(self, other: Event) -> bool:
        """Whether its scope includes the other's thread."""
        if other.thread < 0 or self.thread < 0 or self.scope == "sys":
            return True
        return self.gpu == other.gpu and (self.scope == "gpu" or self.cta == other.cta)


@dataclass
class Litmus:
    """A litmus test.

    Attributes:
        name: its own.
        events: initial stores first, then thread by thread.
        wanted: what the last line asks for: (thread or None for memory, register or address, value).
        allowed: whether the model has to allow it.
    """

    name: str
    events: list[Event] = field(default_factory=list)
    wanted: list[tuple[int | None, str, str]] = field(default_factory=list)
    allowed: bool = True


def parse(text: str) -> Litmus:
    """Reads a test in the syntax of Dartagnan, as far as it is used here."""
    lines = [line.strip() for line in text.strip().splitlines()]
    test = Litmus(lines[0].removeprefix("PTX").strip())
    start, end = lines.index("{"), lines.index("}")
    for line in lines[start + 1 : end]:
        address, _, value = line.rstrip(";").partition("=")
        if ":" not in address:
            test.events.append(Event(len(test.events), -1, 0, 0, "st", "relaxed", "sys", address, value))
    rows = [[cell.strip() for cell in line.rstrip(";").split("|")] for line in lines[end + 1 : -2]]
    for thread, head in enumerate(rows[0]):
        match = _HEAD.fullmatch(head)
        assert match is not None, head
        _, cta, gpu = map(int, match.groups())
        for code in filter(None, (row[thread] for row in rows[1:])):
            match = _CODE.fullmatch(code)
            assert match is not None, f"not one of the instructions that are modelled: {code}"
            kind, order, scope, first, second = match.groups()
            address, value = (second, first) if kind == "ld" else (first, second)
            test.events.append(
                Event(len(test.events), thread, cta, gpu, kind, order, scope, address or "", value or "")
            )
    test.allowed = {"exists": True, "~exists": False}[lines[-2]]
    for term in lines[-1].strip("()").split("/\\"):
        match = _TERM.fullmatch(term.strip())
        assert match is not None, term
        thread_name, name, value = match.groups()
        test.wanted.append((None if thread_name is None else int(thread_name), name, value))
    return test


def is_allowed(test: Litmus) -> bool:
    """Whether some execution that obeys the axioms ends as the test's last line says."""
    return any(_ends_as_wanted(test, source, last) for source, last in _executions(test.events))


def _executions(events: list[Event]) -> Iterator[tuple[dict[int, Event], dict[str, Event]]]:
    """For each execution: whose value each load takes, and the last store to each address."""
    stores: dict[str, list[Event]] = {}
    for event in events:
        if event.kind == "st":
            stores.setdefault(event.address, []).append(event)
    loads = [event for event in events if event.kind == "ld"]
    orders = [[(made[0], *rest) for rest in itertools.permutations(made[1:])] for made in stores.values()]
    for choice in itertools.product(*(stores[load.address] for load in loads)):
        source = {load.number: store for load, store in zip(loads, choice, strict=True)}
        base = _base_causality(events, source)
        for order in itertools.product(*orders):
            if _obeys(events, source, [pair for made in order for pair in itertools.combinations(made, 2)], base):
                yield source, {made[-1].address: made[-1] for made in order}


def _base_causality(events: list[Event], source: dict[int, Event]) -> set[Pair]:
    edges = {(a.number, b.number) for a, b in itertools.combinations(events, 2) if _program_order(a, b)}
    for first, store in _patterns(events, "st"):
        for last, load in _patterns(events, "ld"):
            if source[load.number] == store and _morally_strong(store, load) and _morally_strong(first, last):
                edges.add((first.number, last.number))
    for middle, left, right in itertools.product(range(len(events)), repeat=3):  # transitive closure
        if (left, middle) in edges and (middle, right) in edges:
            edges.add((left, right))
    return edges


def _program_order(a: Event, b: Event) -> bool:
    """Of events in the order of the program; what an address begins with comes before everything."""
    return a.thread in (-1, b.thread) and a.number < b.number


def _patterns(events: list[Event], kind: str) -> Iterator[tuple[Event, Event]]:
    """(outer end, access): of release patterns for "st", of acquire patterns for "ld"."""
    strong = "release" if kind == "st" else "acquire"
    for access in (event for event in events if event.kind == kind and event.thread >= 0):
        for other in (event for event in events if event.thread == access.thread):
            inside = other.number < access.number if kind == "st" else other.number > access.number
            same = other.kind == kind and other.address == access.address and other.order == strong
            if (other == access and access.order == strong) or (inside and (other.kind == "fence" or same)):
                yield other, access


def _morally_strong(a: Event, b: Event) -> bool:
    return a.thread == b.thread or (a.covers(b) and b.covers(a))


def _obeys(events: list[Event], source: dict[int, Event], order: list[tuple[Event, Event]], base: set[Pair]) -> bool:
    later = {(a.number, b.number) for a, b in order}
    reads = {(store.number, load) for load, store in source.items()}
    from_read = {(load, b) for load, store in source.items() for a, b in later if a == store.number}
    one_address = {(a, b) for a, b in base if events[a].address and events[a].address == events[b].address}
    causes = one_address | {
        (store, after) for store, load in reads if _morally_strong(events[store], events[load])
        for before, after in base if before == load and events[after].address == events[store].address
    }  # fmt: skip
    if any((b, a) in later for a, b in causes):  # Coherence
        return False
    if any((b, a) in causes for a, b in reads | from_read):  # Causality
        return False
    together = {
        (a.number, b.number) for a, b in itertools.combinations(events, 2)
        if _program_order(a, b) and a.address and a.address == b.address
    }  # fmt: skip
    together |= {(a, b) for a, b in reads | from_read | later if _morally_strong(events[a], events[b])}
    return not _has_cycle(together, len(events))  # SC-per-location


def _has_cycle(edges: set[Pair], count: int) -> bool:
    left = set(range(count))
    while left:
        free = {node for node in left if not any(b == node and a in left for a, b in edges)}
        if not free:
            return True
        left -= free
    return False


def _ends_as_wanted(test: Litmus, source: dict[int, Event], last: dict[str, Event]) -> bool:
    for thread, name, value in test.wanted:
        if thread is None:
            seen = last[name].value
        else:
            (load,) = (e for e in test.events if e.kind == "ld" and (e.thread, e.value) == (thread, name))
            seen = source[load.number].value
        if seen != value:
            return False
    return True
