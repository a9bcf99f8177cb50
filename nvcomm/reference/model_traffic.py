# SPDX-License-Identifier: Apache-2.0
"""Which words a call sends, where they go, and what has to be collected before a word can be sent.

All collectives are the same thing to the mailbox: a set of `Send`s. A word is collected by its destination in the same
call, unless a switched-off rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nvcomm.reference.model_rules import Rules

DATA, RESULT, RECORD, BLANK, RAW = range(5)  # RAW: a payload word that equals EMPTY and travels as it is (R5 off)
KIND_NAMES = ("word", "result", "record", "blank", "raw word")


@dataclass(frozen=True, slots=True)
class Send:
    """One word from `src_rank` to row `row`, place `place` of the mailbox of `dst_rank`."""

    src_rank: int
    dst_rank: int
    row: int
    place: int
    kind: int = DATA
    needs: tuple[tuple[int, int], ...] = ()  # (row, place) that src_rank has to collect in this call before it sends
    collected: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call of the program that all ranks run.

    Args:
        op: "gather", "two_shot", "reduce_scatter", "broadcast" or "reset".
        sizes: words that each rank sends ("gather"), or one number: the items of a reduction.
        escapes: ranks whose payload holds a reserved word in this call (R5).
        skips_own: this operation does not collect the own row (R2), whatever the rules say of the others.
    """

    op: str
    sizes: tuple[int, ...]
    escapes: frozenset[int] = field(default_factory=frozenset)
    skips_own: bool = False

    @property
    def extent(self) -> int:
        """Words of a row in this call: what packed rows are packed by."""
        return max(self.sizes, default=0)


def gathers(*sizes: int, escapes: frozenset[int] = frozenset()) -> tuple[Call, ...]:
    """Gathers in which every rank sends the same number of words. An LL all-reduce is the same traffic."""
    return tuple(Call("gather", (size,), escapes) for size in sizes)


def _gather(call: Call, world_size: int, rules: Rules) -> Iterator[Send]:
    sizes = call.sizes * world_size if len(call.sizes) == 1 else call.sizes
    if not any(sizes):
        return  # R12: nobody sends, so nobody sends a token either
    for src in range(world_size):
        words = sizes[src] or (1 if rules.tokens else 0)
        for dst in range(world_size):
            collected = src != dst or (rules.own_row and not call.skips_own)
            for place in range(words):
                raw = place == 0 and src in call.escapes and rules.escape == "raw"
                yield Send(src, dst, src, place, RAW if raw else DATA, collected=collected)
            if src in call.escapes and rules.escape != "raw":
                yield Send(src, dst, src, 0, RECORD, collected=collected)


def _two_shot(call: Call, world_size: int, rules: Rules) -> Iterator[Send]:
    """R12: item i is added up by its owner, who hands the result to everybody, all in one generation."""
    own_by_mailbox = rules.two_shot == "own by mailbox"
    for item in range(call.extent):
        owner = item % world_size
        place = item // world_size if rules.two_shot == "packed" else item
        givers = [r for r in range(world_size) if r != owner or own_by_mailbox]
        for src in givers:
            yield Send(src, owner, src, place)
        needs = tuple((src, place) for src in givers)
        for dst in range(world_size):
            collected = rules.two_shot != "results not collected" or dst != owner
            yield Send(owner, dst, owner, place, RESULT, needs, collected)


def _reduce_scatter(call: Call, world_size: int, rules: Rules) -> Iterator[Send]:
    """Item i goes to rank i. With fewer items than ranks, the ranks without an item get tokens (R12)."""
    for dst in range(world_size):
        if dst < call.extent or rules.tokens:
            for src in range(world_size):
                yield Send(src, dst, src, 0)


def _broadcast(call: Call, world_size: int, rules: Rules) -> Iterator[Send]:
    """Rank 0 has the data. With R12 the others send tokens."""
    for src in range(world_size):
        words = call.extent if src == 0 else int(rules.tokens)
        for dst in range(world_size):
            for place in range(words):
                yield Send(src, dst, src, place)


_OPS = {"gather": _gather, "two_shot": _two_shot, "reduce_scatter": _reduce_scatter, "broadcast": _broadcast}


def traffic(call: Call, world_size: int, rules: Rules) -> tuple[Send, ...]:
    """Every word that a call sends; empty for a call that touches no mailbox."""
    return () if call.op == "reset" else tuple(_OPS[call.op](call, world_size, rules))
