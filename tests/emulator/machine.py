# SPDX-License-Identifier: Apache-2.0
"""Runs launches of several ranks beside each other, their threads in a random order.

Time goes in turns. In each some ranks, some warps and sometimes only some lanes go on by a few instructions; what
travels (see `memory`, `barriers`) may land; the clock goes on. CTAs begin at different times. A rank's launches follow
each other as in a stream with programmatic dependent launch: one may begin when every CTA of the one before has
triggered or ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.emulator.barriers import land_stores
from tests.emulator.memory import LAND, Memory
from tests.emulator.program import Launch
from tests.emulator.threads import AT_DEPENDENCY, DONE, READY, WARP, Threads
from tests.emulator.values import Array

TURN_NS = 1_000  # by which the clock goes on
STEPS = (20, 400)  # of a turn
LATEST = 40  # turns by which a CTA begins late
SLOW = 0.1  # of the turns that a slow rank gets


class Machine:
    """Runs launches.

    Args:
        memory: global memory.
        seed: of all that is random.
    """

    def __init__(self, memory: Memory, seed: int) -> None:
        self.memory = memory
        self._random = np.random.default_rng(seed)
        self._turns = 0

    def run(self, chains: Sequence[Sequence[Launch]], slow: int | None = None, limit: int = 1_000_000) -> None:
        """Until all have ended.

        Args:
            chains: each rank's launches.
            slow: the chain that seldom gets a turn.
            limit: of steps, each of them an instruction of any number of threads.

        Raises:
            AssertionError: a wrong access, nobody can go on, or no end is in sight.
        """
        groups: dict[int, list[Launch]] = {}
        for launch in (one for chain in chains for one in chain):
            groups.setdefault(id(launch.program), []).append(launch)
        teams = [Threads(group[0].program, group, self.memory, self._random) for group in groups.values()]
        place = {id(one): (team, which) for team in teams for which, one in enumerate(team.launches)}
        slow_launches = {id(one) for one in (chains[slow] if slow is not None else ())}
        stream = _Streams([[place[id(one)] for one in chain] for chain in chains], self._random)
        with np.errstate(all="ignore"):
            while any((team.status != DONE).any() for team in teams):
                self._turns += 1
                stream.advance(self._turns)
                moved = 0
                for team in teams:
                    team.set_clock(self._turns * TURN_NS)
                    held = [id(one) in slow_launches and self._random.random() > SLOW for one in team.launches]
                    moved += team.turn(self._chosen(team, np.array(held)), int(self._random.integers(*STEPS)))
                    land_stores(team, 0.5)
                self.memory.land(LAND)
                limit -= moved
                assert limit > 0, "no end: a rank that never publishes?"
                if not moved:
                    _check_alive(teams, stream)
            assert not any(team.stores for team in teams), "stores under way to CTAs that have exited"

    def _chosen(self, team: Threads, held: Array) -> Array:
        """Who goes on in this turn. Most of the time most of them: threads that stay together cost no more than one."""
        random = self._random
        launches = ~held & (random.random(len(held)) < (0.8 if len(held) > 1 else 1))
        warps = random.random(len(team.pc) // WARP) < random.choice((1, 1, 0.75, 0.5))
        chosen = launches[team.launch] & np.repeat(warps, WARP)
        if random.random() < 0.1:
            chosen &= random.random(len(chosen)) < 0.6
        return chosen


class _Streams:
    """Each rank's launches, one behind the other.

    Args:
        chains: launches as (threads, number among their launches).
        random: when CTAs begin.
    """

    def __init__(self, chains: list[list[tuple[Threads, int]]], random: np.random.Generator) -> None:
        self._waiting = [list(chain) for chain in chains]
        self._last: list[tuple[Threads, int] | None] = [None] * len(chains)
        self._behind: list[tuple[tuple[Threads, int], tuple[Threads, int]]] = []
        self._beginning: list[tuple[int, Threads, int]] = []
        self._random = random

    @property
    def anything_to_come(self) -> bool:
        """Whether a CTA will begin by itself."""
        return bool(self._beginning)

    def advance(self, turn: int) -> None:
        """Lets begin what may."""
        for (before, number), (team, which) in self._behind:
            if before.launch_done(number):
                team.before_ended[which] = True
                team.release(AT_DEPENDENCY, lambda waiting, team=team, which=which: team.launch[waiting] == which)
        self._behind = [one for one in self._behind if not one[1][0].before_ended[one[1][1]]]
        for i, chain in enumerate(self._waiting):
            last = self._last[i]
            if chain and (last is None or last[0].lets_dependents_begin(last[1])):
                self._launch(turn, last, chain[0])
                self._last[i] = chain.pop(0)
        due = [one for one in self._beginning if one[0] <= turn]
        self._beginning = [one for one in self._beginning if one[0] > turn]
        for _, team, cta in due:
            team.begin(np.array([cta]))

    def _launch(self, turn: int, last: tuple[Threads, int] | None, new: tuple[Threads, int]) -> None:
        team, which = new
        if last is None or last[0].launch_done(last[1]):
            team.before_ended[which] = True
        else:
            self._behind.append((last, new))
        for cta in np.flatnonzero(team.launch_of_cta == which).tolist():
            delay = int(self._random.integers(LATEST)) if self._random.random() < 0.5 else 0
            self._beginning.append((turn + delay, team, cta))


def _check_alive(teams: list[Threads], stream: _Streams) -> None:
    """Nothing moved: is there anything that will?"""
    if stream.anything_to_come or any(team.stores or (team.status == READY).any() for team in teams):
        return
    waiting = [text for team in teams for text in team.describe()]
    raise AssertionError("wait for ever:\n" + "\n".join(waiting[:20]))
