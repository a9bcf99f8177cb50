# SPDX-License-Identifier: Apache-2.0
"""What a graph of a stress run launches: a collective finds its inputs filled and is compared once, by its replay."""

from __future__ import annotations

import pytest

from stress import ledger
from stress.graph_steps import CollectiveStep, LateStep, Step, TurnStep, steps_of
from stress.plan import GraphSpec

FIRST = 40  # of the launch
SIZES = ((4, 8, 12), (5, 9, 13), (6, 10, 14), (7, 11, 15), (16, 4, 8), (20, 8, 4), (4, 20, 8), (8, 4, 20))
GATHERS = range(3)


def follow(steps: list[Step], replays: int) -> list[tuple[int, int]]:
    """Does what the steps say; returns what was compared, as (replay, gather), and fails where it makes no sense."""
    cells: dict[int, int] = {0: FIRST}
    inputs: dict[int, tuple[int, int]] = {}  # gather -> the replay that it was filled for, and its words
    outputs: dict[int, tuple[int, int]] = {}
    compared = []
    for step in steps:
        match step:
            case TurnStep():
                assert step.cell_in != step.cell_out, "two CTAs would race"
                replay = cells[step.cell_in]
                for gather in GATHERS:
                    if step.check[gather]:
                        assert outputs.pop(gather) == (replay, step.check[gather])
                        compared.append((replay, gather))
                    if step.fill[gather]:
                        inputs[gather] = (replay + step.step, step.fill[gather])
                cells[step.cell_out] = replay + step.step
            case LateStep():
                assert not outputs, "late in mid-replay"
                assert cells[step.cell] == FIRST + len(compared) // 3
            case CollectiveStep():
                assert step.gather not in outputs, "an output that nobody has compared"
                assert inputs.pop(step.gather) == (cells[step.cell], step.words)
                outputs[step.gather] = (cells[step.cell], step.words)
    assert not outputs
    assert not inputs
    assert cells[0] == FIRST + replays
    return compared


def spec(replays: int, *, spaced: bool, late_rank: int | None = None) -> GraphSpec:
    return GraphSpec(0, SIZES[:replays], late_rank, spaced, big=False)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("late_rank", [None, 1, 2])
@pytest.mark.parametrize("replays", [1, 2, 8])
def test_every_collective_of_every_replay_is_compared_once(replays, late_rank, spaced):
    steps = list(steps_of(spec(replays, spaced=spaced, late_rank=late_rank), 2))
    assert follow(steps, replays) == [(FIRST + replay, gather) for replay in range(replays) for gather in GATHERS]
    assert sum(isinstance(step, LateStep) for step in steps) == (replays if late_rank == 2 else 0)


def test_only_a_spaced_graph_has_anything_between_its_gathers():
    kinds = [type(step) for step in steps_of(spec(2, spaced=False), 0)]
    assert kinds == [TurnStep, *[CollectiveStep] * 3, TurnStep, *[CollectiveStep] * 3, TurnStep]
    kinds = [type(step) for step in steps_of(spec(2, spaced=True), 0)]
    assert kinds == [TurnStep, *[CollectiveStep, TurnStep] * 6]


@pytest.mark.parametrize("spaced", [False, True])
def test_without_any_one_turn_or_collective_it_would_be_noticed(spaced):
    """The negative control of `follow`."""
    steps = list(steps_of(spec(2, spaced=spaced), 0))
    for at in range(len(steps)):
        with pytest.raises((AssertionError, KeyError)):
            follow(steps[:at] + steps[at + 1 :], 2)


def test_a_graph_of_more_turns_than_the_ledger_has_cells_is_refused():
    too_many = GraphSpec(0, SIZES * (ledger.NUM_CELLS // 8), None, spaced=False, big=False)
    with pytest.raises(ValueError, match="does not fit the ledger"):
        list(steps_of(too_many, 0))
