# SPDX-License-Identifier: Apache-2.0
"""A run that did not end: who waited for whom, and where every rank was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from nvcomm.errors import PeerTimeoutError


@dataclass(frozen=True, slots=True)
class Wait:
    """Rank `rank` waited for a word of rank `src_rank` until its timeout."""

    rank: int
    src_rank: int
    generation: int
    slot: int
    word: int
    waited_s: float
    root_rank: int

    @classmethod
    def of(cls, error: PeerTimeoutError) -> Wait:
        """What an error says."""
        return cls(
            error.rank, error.src_rank, error.generation, error.slot, error.word, error.waited_s, error.root_rank
        )

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waits for rank {self.src_rank}: generation {self.generation}, slot {self.slot}, "
            f"word {self.word}, for {self.waited_s:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank was: `replay` and `gather` begun and not finished; `note` says what became of the rank itself.

    `gone`: its process ended early, or stands still.
    """

    rank: int
    replay: int
    gather: int
    note: str = ""
    gone: bool = False

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"rank {self.rank} is in gather {self.gather} of replay {self.replay}{note}"


@dataclass(frozen=True, slots=True)
class Hang:
    """Everything that is known about a hang.

    Attributes:
        reason: how it was noticed.
        waits: what ranks reported when they gave up.
        positions: where each rank was, as far as known.
    """

    reason: str
    waits: tuple[Wait, ...] = ()
    positions: tuple[Position, ...] = ()

    @property
    def root_ranks(self) -> tuple[int, ...]:
        """The ranks at the end of the chains of "waits for"; without reports, who is gone, or furthest behind."""
        if self.waits:
            waiting = {wait.rank for wait in self.waits}
            roots = {wait.root_rank for wait in self.waits} | {wait.src_rank for wait in self.waits}
            return tuple(sorted(roots - waiting or roots))
        if gone := tuple(sorted(position.rank for position in self.positions if position.gone)):
            return gone
        if not self.positions:
            return ()
        last = min((position.replay, position.gather) for position in self.positions)
        return tuple(sorted(p.rank for p in self.positions if (p.replay, p.gather) == last))

    def lines(self) -> Iterable[str]:
        """The report, for people."""
        yield f"HANG: {self.reason}"
        yield from (f"  {wait}" for wait in self.waits)
        yield from (f"  {position}" for position in self.positions)
        if self.root_ranks:
            yield f"  everybody waits, in the end, for rank {', '.join(map(str, self.root_ranks))}"

    def as_json(self) -> dict[str, object]:
        """A JSON object."""
        return {
            "reason": self.reason,
            "waits": [asdict(wait) for wait in self.waits],
            "positions": [asdict(position) for position in self.positions],
            "root_ranks": list(self.root_ranks),
        }
