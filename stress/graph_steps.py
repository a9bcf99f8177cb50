# SPDX-License-Identifier: Apache-2.0
"""What one launch of a graph does on a rank's stream, in order.

A graph of K replays, whose gathers G0 G1 G2 follow each other with nothing between them:

    turn(fill 0) [late] G0 G1 G2 turn(check 0, fill 1) [late] G0 G1 G2 ... turn(check K - 1)

A *spaced* graph has a turn after every gather instead, which checks that gather and fills the next. Each turn reads the
ledger cell that the one before it wrote; the last one of a graph writes cell 0, where the next launch begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stress import ledger, oracle
from stress.plan import GraphSpec, Sizes

NOTHING: Sizes = (0,) * oracle.GATHERS_PER_REPLAY


@dataclass(frozen=True, slots=True)
class TurnStep:
    """Outputs are checked and inputs filled.

    Attributes:
        check, fill: words per row of each gather to check and to fill; 0: not this one.
        cell_in: the ledger cell that holds the number of the replay to check.
        cell_out: the cell that takes the number of the replay to fill.
        step: 1 if that is the next replay, else 0.
    """

    check: Sizes
    fill: Sizes
    cell_in: int
    cell_out: int
    step: int


@dataclass(frozen=True, slots=True)
class LateStep:
    """The rank is late; `cell` holds the number of the replay to come."""

    cell: int


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Collective number `gather` of the replay in `cell`, in place of a gather of `words` words."""

    gather: int
    words: int
    cell: int


Step = TurnStep | LateStep | CollectiveStep


def steps_of(spec: GraphSpec, rank: int) -> Iterator[Step]:
    """The steps of `rank`.

    Raises:
        ValueError: the ledger has too few cells.
    """
    turns = 1 + len(spec.replays) * (oracle.GATHERS_PER_REPLAY if spec.spaced else 1)
    if turns > ledger.NUM_CELLS:
        raise ValueError(f"a graph of {turns} turns does not fit the ledger: it has {ledger.NUM_CELLS} cells")
    last = len(spec.replays) - 1
    yield TurnStep(NOTHING, _first(spec, 0), cell_in=0, cell_out=1, step=0)
    cell = 1
    for number, sizes in enumerate(spec.replays):
        if spec.late_rank == rank:
            yield LateStep(cell)
        for gather, words in enumerate(sizes):
            yield CollectiveStep(gather, words, cell)
            if spec.spaced and gather < len(sizes) - 1:
                yield TurnStep(_only(sizes, gather), _only(sizes, gather + 1), cell, cell + 1, step=0)
                cell += 1
        check = _only(sizes, len(sizes) - 1) if spec.spaced else sizes
        if number < last:
            yield TurnStep(check, _first(spec, number + 1), cell, cell + 1, step=1)
            cell += 1
    yield TurnStep(check, NOTHING, cell, 0, step=1)


def _first(spec: GraphSpec, replay: int) -> Sizes:
    """What is filled before a replay."""
    sizes = spec.replays[replay]
    return _only(sizes, 0) if spec.spaced else sizes


def _only(sizes: Sizes, gather: int) -> Sizes:
    """The sizes of one gather, nothing for the others."""
    return tuple(words if g == gather else 0 for g, words in enumerate(sizes))
