# SPDX-License-Identifier: Apache-2.0
"""Search: breadth first over all states, so that the first failure is a shortest one, and seeded random walks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvcomm.reference.model_machine import Machine
from nvcomm.reference.model_rules import Verdict
from nvcomm.reference.model_steps import Action, Record, State, Violation


@dataclass(frozen=True, slots=True)
class Result:
    """How a search ended.

    Args:
        verdict: what was found.
        detail: what went wrong, in words.
        states: different states seen (breadth first), or actions taken (walks).
        seconds: processor time.
        trace: the actions of a failing run.
    """

    verdict: Verdict
    detail: str
    states: int
    seconds: float
    trace: tuple[Action, ...] = ()


def _renumberings(machine: Machine) -> list[Callable[[State], State]]:
    """One function per renumbering of the ranks that leaves the program as it is."""
    plan = machine.plan

    def renumber(perm: tuple[int, ...], cell_to: tuple[int, ...]) -> Callable[[State], State]:
        old_rank_of = sorted(range(plan.world_size), key=perm.__getitem__)
        old_cell_of = sorted(range(plan.num_cells), key=cell_to.__getitem__)
        blocks = tuple(range(plan.num_cells, plan.num_cells + plan.world_size))
        target = (*cell_to, *(blocks[rank] for rank in perm))
        source = (*old_cell_of, *(blocks[rank] for rank in old_rank_of))
        values: dict[int, int] = {0: 0}

        def value_to(value: object) -> object:
            if not isinstance(value, int):
                return value  # a state block
            if value not in values:
                call, kind, src_rank = plan.parts(value)
                values[value] = plan.value(call, kind, perm[src_rank])
            return values[value]

        def grid_to(grid: Record) -> Record:
            return grid._replace(pending=tuple(sorted(target[c] for c in grid.pending))) if grid.pending else grid

        def rank_to(rank: tuple[Any, ...]) -> tuple[Any, ...]:
            grids, status, entered = rank
            return tuple(map(grid_to, grids)), perm[status] if status >= 0 else status, entered

        def apply(state: State) -> State:
            memory, flights, ranks = state
            return (
                tuple(value_to(memory[cell]) for cell in source),
                tuple(sorted((target[c], value_to(v), g) for c, v, g in flights)),
                tuple(rank_to(ranks[rank]) for rank in old_rank_of),
            )

        return apply

    return [renumber(perm, cell_to) for perm, cell_to in plan.symmetries()]


def explore(machine: Machine, *, symmetry: bool = False, max_states: int | None = None) -> Result:
    """Visit every reachable state, breadth first.

    Args:
        machine: the transition system.
        symmetry: count states that differ by a renumbering of the ranks once. A trace is then not given.
        max_states: give up beyond that many.

    Raises:
        MemoryError: more than `max_states` states.
    """
    begun = time.process_time()
    others = _renumberings(machine) if symmetry else []

    def canonical(state: State) -> State:
        return min(state, *(other(state) for other in others)) if others else state

    def result(verdict: Verdict, detail: str = "", trace: tuple[Action, ...] = ()) -> Result:
        return Result(verdict, detail, len(parent), time.process_time() - begun, trace)

    first = canonical(machine.initial())
    parent: dict[State, tuple[State, Action] | None] = {first: None}

    def path(state: State, *last: Action) -> tuple[Action, ...]:
        actions = list(last)
        while (step := parent[state]) is not None:
            state, action = step
            actions.insert(0, action)
        return () if others else tuple(actions)

    layer = [first]
    while layer:
        coming: list[State] = []
        for state in layer:
            actions = machine.actions(state)
            if not actions:
                verdict, detail = machine.ended(state)
                if verdict != Verdict.OK:
                    return result(verdict, detail, path(state))
            for action in actions:
                try:
                    after = canonical(machine.apply(state, action))
                except Violation as violation:
                    return result(violation.verdict, str(violation), path(state, action))
                if after not in parent:
                    parent[after] = (state, action)
                    coming.append(after)
        if max_states is not None and len(parent) > max_states:
            raise MemoryError(f"{len(parent)} states and no end: run it with a larger max_states, or fewer words")
        layer = coming
    return result(Verdict.OK)


def walk(machine: Machine, walks: int, seed: int) -> Result:
    """Random runs, each with its own taste: some ranks' words and some kinds of action are kept waiting.

    Args:
        machine: the transition system.
        walks: how many runs.
        seed: of the generator; the same seed gives the same runs.
    """
    begun = time.process_time()
    rng = random.Random(seed)
    steps = 0
    for _ in range(walks):
        state = machine.initial()
        trace: list[Action] = []
        taste: dict[object, float] = {}
        while actions := machine.actions(state):
            weights = [_taste(machine, action, taste, rng) for action in actions]
            action = rng.choices(actions, weights)[0]
            trace.append(action)
            steps += 1
            try:
                state = machine.apply(state, action)
            except Violation as violation:
                return Result(violation.verdict, str(violation), steps, time.process_time() - begun, tuple(trace))
        verdict, detail = machine.ended(state)
        if verdict != Verdict.OK:
            return Result(verdict, detail, steps, time.process_time() - begun, tuple(trace))
    return Result(Verdict.OK, "", steps, time.process_time() - begun)


def _taste(machine: Machine, action: Action, taste: dict[object, float], rng: random.Random) -> float:
    """How eagerly this run takes such an action: a weight per kind and rank, drawn once a run."""
    key: tuple[object, ...] = action[:2]
    if action[0] == "land":
        cell, value, grid = action[1]
        source = machine.plan.parts(value)[2] if grid < 0 and value else -1
        key = ("land", machine.plan.home(cell), source)
    if key not in taste:
        taste[key] = 10.0 ** rng.uniform(-3, 0)
    return taste[key]


def narrate(machine: Machine, trace: tuple[Action, ...]) -> list[str]:
    """A failing run in words, a line for everything that happens."""
    log: list[str] = []
    state = machine.initial(log)
    for action in trace:
        try:
            state = machine.apply(state, action, log)
        except Violation as violation:
            return [*log, f"{violation.verdict}: {violation}"]
    verdict, detail = machine.ended(state)
    return [*log, f"{verdict}: {detail}"]
