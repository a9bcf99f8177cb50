# SPDX-License-Identifier: Apache-2.0
"""R8, nobody starves: a small model of which CTAs hold a place on the device.

A CTA keeps its place until it ends, and one that spins ends only when every rank of its group has published its chunk.
The device gives a free place to any CTA of any grid that has started, in any order: CUDA promises none. The search
tries every order; it fails where all places are held by CTAs that wait for CTAs without one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from nvcomm.reference.model_rules import Verdict
from nvcomm.reference.model_search import Result

OUTSIDE, INSIDE, ENDED = range(3)  # of a CTA: no place yet, holds a place, gave it back


@dataclass(frozen=True, slots=True)
class Residency:
    """Ranks that share one device.

    Args:
        places: CTAs that fit on the device at once.
        ranks: ranks of a group, all on this device.
        ctas: CTAs of a grid that spins.
        groups: communicators in use at once; they do not wait for each other.
        calls: calls in a row.
        early: a grid triggers its dependent early, so CTAs of the next grid wait in their places (PDL).
        publishers: CTAs of a publish grid of its own, which never spins; 0 where each spinning CTA publishes its chunk.
        wide: with an early trigger, every second grid has twice the CTAs. "plain": it is launched when the grid before
            it has ended, and triggers nobody. "early": it overlaps with its neighbours like any other.
    """

    places: int
    ranks: int = 2
    ctas: int = 2
    groups: int = 1
    calls: int = 2
    early: bool = False
    publishers: int = 0
    wide: Literal["", "plain", "early"] = ""

    @property
    def places_needed(self) -> int:
        """R8: all that may spin, the dependents that an early trigger lets wait, and one publisher."""
        spinning = self.groups * self.ranks * self.ctas * (2 if self.wide == "early" else 1)
        dependents = self.groups * self.ranks * (self.publishers or self.ctas) if self.early else 0
        return spinning + dependents + (1 if self.publishers else 0)

    def grids(self) -> list[tuple[int, bool]]:
        """A stream: (CTAs, whether they spin) of each grid."""
        if self.publishers:
            return [(self.publishers, False), (self.ctas, True)] * self.calls
        return [(self.ctas * (2 if self.is_wide(call) else 1), True) for call in range(self.calls)]

    def is_wide(self, grid: int) -> bool:
        """Whether a grid is one of the wide ones."""
        return bool(self.wide) and grid % 2 == 1

    def overlaps(self, grid: int) -> bool:
        """Whether CTAs of a grid may take places before the grid before it has ended."""
        plain = self.wide == "plain" and (self.is_wide(grid) or self.is_wide(grid - 1))
        return self.early and not plain


State = tuple[tuple[tuple[int, ...], ...], ...]  # stream, grid, CTA


class _Device:
    """The transition system of a setup."""

    def __init__(self, setup: Residency) -> None:
        self.setup = setup
        self.grids = setup.grids()
        self.streams = setup.groups * setup.ranks

    def initial(self) -> State:
        """Nobody holds a place."""
        return tuple(tuple((OUTSIDE,) * ctas for ctas, _ in self.grids) for _ in range(self.streams))

    def _started(self, state: State, stream: int, grid: int) -> bool:
        """Whether CTAs of a grid may take places."""
        if grid == 0:
            return True
        before = state[stream][grid - 1]
        if not self.setup.overlaps(grid):
            return all(cta == ENDED for cta in before)
        # A grid triggers once its own wait is over (R1 ii), and all of its CTAs have to.
        return self._released(state, stream, grid - 1) and OUTSIDE not in before

    def _released(self, state: State, stream: int, grid: int) -> bool:
        """Whether the wait for the grid before is over."""
        return grid == 0 or all(cta == ENDED for cta in state[stream][grid - 1])

    def _published(self, state: State, stream: int, grid: int, cta: int) -> bool:
        """Whether a rank has published chunk `cta` of the call that `grid` belongs to."""
        if self.setup.publishers:
            publish_grid = grid - grid % 2
            publisher = cta % self.setup.publishers
            return state[stream][publish_grid][publisher] == ENDED
        return state[stream][grid][cta] != OUTSIDE and self._released(state, stream, grid)

    def settle(self, state: State) -> State:
        """End every CTA that can end."""
        now = [[list(ctas) for ctas in stream] for stream in state]
        moved = True
        while moved:
            moved = False
            frozen: State = tuple(tuple(tuple(ctas) for ctas in stream) for stream in now)
            for stream in range(self.streams):
                group = stream - stream % self.setup.ranks
                peers = range(group, group + self.setup.ranks)
                for grid, (num_ctas, spins) in enumerate(self.grids):
                    for cta in range(num_ctas):
                        if now[stream][grid][cta] != INSIDE or not self._released(frozen, stream, grid):
                            continue
                        if not spins or all(self._published(frozen, peer, grid, cta) for peer in peers):
                            now[stream][grid][cta] = ENDED
                            moved = True
        return frozen

    def choices(self, state: State) -> list[tuple[int, int, int]]:
        """CTAs to which the device may give a place now."""
        held = sum(cta == INSIDE for stream in state for ctas in stream for cta in ctas)
        if held >= self.setup.places:
            return []
        return [
            (stream, grid, cta)
            for stream in range(self.streams)
            for grid in range(len(self.grids))
            if self._started(state, stream, grid)
            for cta, where in enumerate(state[stream][grid])
            if where == OUTSIDE
        ]

    def place(self, state: State, choice: tuple[int, int, int]) -> State:
        """Give a CTA a place, and end what can end."""
        stream, grid, cta = choice
        streams = [[list(ctas) for ctas in s] for s in state]
        streams[stream][grid][cta] = INSIDE
        return self.settle(tuple(tuple(tuple(ctas) for ctas in s) for s in streams))


def explore_residency(setup: Residency) -> Result:
    """Try every order in which the device can give out places; a failing trace is a shortest one."""
    begun = time.process_time()
    device = _Device(setup)
    first = device.initial()
    parent: dict[State, tuple[State, tuple[int, int, int]] | None] = {first: None}
    layer = [first]
    while layer:
        coming: list[State] = []
        for state in layer:
            choices = device.choices(state)
            if not choices and any(cta != ENDED for stream in state for ctas in stream for cta in ctas):
                trace: list[tuple[int, int, int]] = []
                while (step := parent[state]) is not None:
                    state, choice = step
                    trace.insert(0, choice)
                detail = f"all {setup.places} places are held by CTAs that wait for CTAs without one"
                return Result(Verdict.DEADLOCK, detail, len(parent), time.process_time() - begun, tuple(trace))
            for choice in choices:
                after = device.place(state, choice)
                if after not in parent:
                    parent[after] = (state, choice)
                    coming.append(after)
        layer = coming
    return Result(Verdict.OK, "", len(parent), time.process_time() - begun)


def narrate_residency(setup: Residency, result: Result) -> list[str]:
    """The failing order in words."""
    lines = []
    for stream, grid, cta in result.trace:
        group, rank = divmod(stream, setup.ranks)
        lines.append(f"communicator {group} rank {rank}: CTA {cta} of grid {grid} gets a place")
    return [*lines, f"{result.verdict}: {result.detail}"]
