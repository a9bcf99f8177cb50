# SPDX-License-Identifier: Apache-2.0
"""What a run between CPU processes comes to: read from the status page once it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvcomm.errors import NvcommError, UnsupportedError
from stress import host_sums, sum_oracle
from stress.audit import audit_ranks
from stress.decode import BadWord, Origin, decode
from stress.hang import Hang, Position, Wait
from stress.page import Field, State, StatusPage
from stress.plan import Plan
from stress.run import Outcome, RunConfig


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a rank's process, in words, and whether it ended early or stands still."""

    note: str = ""
    gone: bool = False


class RankFailedError(NvcommError):
    """A rank raised something that it should not; the message is its traceback."""


def outcome_of(config: RunConfig, plan: Plan, page: StatusPage, reason: str | None, fates: Sequence[Fate]) -> Outcome:
    """Puts together what the ranks left on the page.

    Args:
        config, plan: of the run.
        page: the ranks have ended, or nothing moved any more.
        reason: how that was noticed.
        fates: of each rank's process.

    Raises:
        UnsupportedError: a rank cannot do it.
        RankFailedError: a rank raised something that it should not.
    """
    states = [page.state(rank) for rank in range(config.ranks)]
    for rank, state in enumerate(states):
        if state is State.UNSUPPORTED:
            raise UnsupportedError(page.text(rank))
    first_bad = _first_bad(plan, config.op, page)
    for rank, state in enumerate(states):
        if state is State.FAILED:
            before = f"\nBefore that: {first_bad}" if first_bad else ""
            raise RankFailedError(f"rank {rank} failed:\n{page.text(rank)}{before}")
    hang = None
    stopped_by_us = config.stop_on_bad and bool(page.lines[:, Field.BAD_WORDS].any())
    if any(state is not State.DONE for state in states) and not stopped_by_us:
        hang = _hang(page, reason, fates)
    lines = page.lines
    facts: list[dict[str, Any]] = []
    audit: tuple[str, ...] = ()
    if set(states) == {State.DONE}:
        facts = [json.loads(page.text(rank)) for rank in range(config.ranks)]
        counts = lines[:, Field.REPLAY].tolist(), lines[:, Field.GATHERS].tolist()
        launched = config.replays if config.duration_s is None else None
        audit = tuple(audit_ranks(config.ranks, *counts, [fact["audit"] for fact in facts], launched))
    started = [start for start in lines[:, Field.STARTED_NS].tolist() if start]
    ends = [line[Field.ENDED_NS] or time.monotonic_ns() for line in lines]
    replays = int(lines[:, Field.REPLAY].min())
    return Outcome(
        replays=replays,
        gathers=int(lines[:, Field.GATHERS].min()),
        bad_words=int(lines[:, Field.BAD_WORDS].sum()),
        first_bad=first_bad,
        seconds=float(max(ends) - min(started)) / 1e9 if started else 0.0,
        audit=audit,
        stats=tuple(fact["stats"] for fact in facts),
        hang=hang,
        missing=sum_oracle.missing(config.op, plan.sizes_of(replays)),
    )


def _hang(page: StatusPage, reason: str | None, fates: Sequence[Fate]) -> Hang:
    waits, positions = [], []
    for rank, line in enumerate(page.lines):
        values = [int(value) for value in line]
        if page.state(rank) is State.TIMED_OUT:
            waits.append(
                Wait(
                    rank,
                    values[Field.WAIT_SRC_RANK],
                    values[Field.WAIT_GENERATION],
                    values[Field.WAIT_SLOT],
                    values[Field.WAIT_WORD],
                    values[Field.WAIT_US] / 1e6,
                    values[Field.WAIT_ROOT_RANK],
                )
            )
        fate = fates[rank]
        positions.append(Position(rank, values[Field.REPLAY], values[Field.GATHER], fate.note, fate.gone))
    return Hang(reason or "a rank waited in vain", tuple(waits), tuple(positions))


def _first_bad(plan: Plan, op: str, page: StatusPage) -> BadWord | None:
    """Each rank keeps its first wrong word; this is the first of those."""
    found = []
    for rank, line in enumerate(page.lines.tolist()):
        if line[Field.BAD_WORDS]:
            place = [line[f] for f in (Field.BAD_SRC_RANK, Field.BAD_GATHER, Field.BAD_REPLAY, Field.BAD_INDEX)]
            seen = line[Field.BAD_SEEN]
            of_sum = None if op == "all_gather" else host_sums.explain(plan, op, rank, Origin(*place), seen)
            found.append(of_sum or decode(plan.oracle, rank, Origin(*place), seen, plan.row_words))
    return min(found, key=BadWord.order, default=None)
