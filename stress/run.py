# SPDX-License-Identifier: Apache-2.0
"""What a run is asked for and what comes out of it, whatever world it ran in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from nvcomm.mailbox import GENERATION_MASK
from stress import oracle
from stress.decode import BadWord
from stress.hang import Hang
from stress.sum_oracle import WAYS

World = Literal["host", "virtual", "peer"]
Transport = Literal["auto", "peer", "multicast", "delayed"]
ProtocolName = Literal["mailbox", "late-copy"]

# What a replay is made of; "mixed" is everything on one mailbox, see `stress.sum_oracle`.
OPS = tuple(WAYS)

# Runs begin a few hundred replays before the 32-bit count of collectives wraps (docs/mailbox.md R6).
FIRST_GENERATION = GENERATION_MASK - 1000


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run.

    Attributes:
        world: where the ranks live.
        transport: how a word reaches the mailboxes; "auto": multicast where the world has it, else a store per rank.
        protocol: "mailbox", or "late-copy", the protocol that is known to be wrong.
        op: the collective, one of `OPS`.
        ranks: world size.
        seed: everything random follows from it.
        replays: how many, or None: until `duration_s` is over, or `oracle.MAX_REPLAYS`. Rounded up to whole graphs.
        duration_s: at most so many seconds of replays, or None.
        timeout_s: bound of a rank's wait for another.
        pdl: how GPU kernels follow each other; see `nvcomm.Communicator`. Unused in the host world.
        stop_on_bad: end soon after the first wrong word, which is all that a control needs.
    """

    world: World
    transport: Transport
    protocol: ProtocolName
    op: str
    ranks: int
    seed: int
    replays: int | None
    duration_s: float | None
    timeout_s: float
    pdl: str = "safe"
    stop_on_bad: bool = False

    @property
    def replay_limit(self) -> int:
        """Replays after which the run ends in any case."""
        return oracle.MAX_REPLAYS if self.replays is None else self.replays

    def but(self, **changes: object) -> RunConfig:
        """The same run with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run saw.

    Attributes:
        replays: replays that every rank has finished.
        gathers: collectives whose every output word was compared, on every rank.
        bad_words: words, over all ranks, that were not what they had to be.
        first_bad: the one of the earliest replay.
        seconds: replays only, without set-up.
        audit: what ranks' counts and mailboxes should not have said after the run, see `audit.py`.
        stats: for each rank what its communicator counted.
        hang: set when the run did not end.
        transport: what "auto" turned out to be.
        missing: collectives of the operation that no replay held.
    """

    replays: int
    gathers: int
    bad_words: int
    first_bad: BadWord | None
    seconds: float
    audit: tuple[str, ...] = ()
    stats: tuple[dict[str, object], ...] = ()
    hang: Hang | None = None
    transport: Transport = "peer"
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class Progress:
    """How far a run is; the runner updates it and calls `show` now and then.

    Attributes:
        show: (replays finished, wrong words so far).
    """

    show: Callable[[int, int], None] = field(default=lambda replays, bad_words: None)


class Runner(Protocol):
    """Runs in one world. Built once, used for the control and for the run."""

    def agreed(self, config: RunConfig) -> RunConfig:
        """The same config in every process of the world.

        Raises:
            UsageError: they were started for different runs.
        """
        ...

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        """Replays.

        Raises:
            UnsupportedError: this machine or build cannot do what `config` asks.
            NvcommError: whatever else went wrong, hangs excepted: those are in the outcome.
        """
        ...

    @property
    def reports(self) -> bool:
        """Whether this process prints: one of the processes of a world does."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
