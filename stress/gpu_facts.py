# SPDX-License-Identifier: Apache-2.0
"""What one process of a GPU world saw, as JSON, and the outcome that follows from what all processes saw.

Every process of a peer world computes the outcome from the same facts, so all come to the same verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nvcomm.errors import PeerTimeoutError
from stress.audit import audit_ranks
from stress.decode import BadWord
from stress.gpu_rank import GpuRank
from stress.hang import Hang, Position, Wait
from stress.run import Outcome

Facts = dict[str, Any]


def collect_facts(comms: Sequence[Any], ranks: Sequence[GpuRank], hang_reason: str | None) -> Facts:
    """Waits for what was launched, and reads ledgers, faults and, where all went well, mailboxes."""
    torch.cuda.synchronize()
    for rank in ranks:
        rank.snapshot()
    torch.cuda.synchronize()
    readings = [rank.reading() for rank in ranks]
    firsts = [first for rank in ranks if (first := rank.first_bad())]
    waits = find_waits(comms)
    hung = hang_reason is not None or bool(waits)
    return {
        "replays": [reading.replay for reading in readings],
        "gathers": [reading.gathers for reading in readings],
        "bad_words": sum(reading.bad_words for reading in readings),
        "firsts": [first.as_json() for first in firsts],
        "reason": hang_reason or (str(waits[0]) if waits else None),
        "waits": [dataclasses.asdict(wait) for wait in waits],
        "positions": [dataclasses.asdict(position) for position in find_positions(ranks)] if hung else [],
        "audits": [] if hung else [dataclasses.asdict(comm.audit()) for comm in comms],
        "stats": [dataclasses.asdict(comm.stats()) for comm in comms],
    }


def merge_facts(facts: Sequence[Facts], num_ranks: int, launched_replays: int | None, seconds: float) -> Outcome:
    """Puts the processes' facts together.

    Args:
        facts: of every process that answered.
        num_ranks: world size.
        launched_replays: how many there should be, or None where the run did not get that far.
        seconds: of replays.
    """
    replays = [count for fact in facts for count in fact["replays"]]
    gathers = [count for fact in facts for count in fact["gathers"]]
    reasons = [fact["reason"] for fact in facts if fact["reason"]]
    hang = None
    if reasons:
        waits = tuple(Wait(**wait) for fact in facts for wait in fact["waits"])
        positions = tuple(Position(**position) for fact in facts for position in fact["positions"])
        hang = Hang(reasons[0], waits, positions)
    mailboxes = [audit for fact in facts for audit in fact["audits"]]
    audit = () if hang else tuple(audit_ranks(num_ranks, replays, gathers, mailboxes, launched_replays))
    return Outcome(
        replays=min(replays, default=0),
        gathers=min(gathers, default=0),
        bad_words=sum(fact["bad_words"] for fact in facts),
        first_bad=min(
            (BadWord.from_json(first) for fact in facts for first in fact["firsts"]), key=BadWord.order, default=None
        ),
        seconds=seconds,
        audit=audit,
        stats=tuple(stats for fact in facts for stats in fact["stats"]),
        hang=hang,
    )


def last_seen(ranks: Sequence[GpuRank], hang: Hang) -> Outcome:
    """What is known of a run that stands still: the ledgers as of the last look."""
    readings = [rank.reading() for rank in ranks]
    return Outcome(
        replays=min((reading.replay for reading in readings), default=0),
        gathers=min((reading.gathers for reading in readings), default=0),
        bad_words=sum(reading.bad_words for reading in readings),
        first_bad=min((bad for rank in ranks if (bad := rank.first_bad())), key=BadWord.order, default=None),
        seconds=0.0,
        hang=hang,
    )


def find_waits(comms: Sequence[Any]) -> list[Wait]:
    """What ranks recorded when they gave up."""
    waits = []
    for comm in comms:
        try:
            comm.check()
        except PeerTimeoutError as error:
            waits.append(Wait.of(error))
    return waits


def find_positions(ranks: Sequence[GpuRank]) -> list[Position]:
    """Where the ranks were when their ledgers were last read, in whole graphs."""
    return [Position(rank.comm.rank, rank.reading().replay, 0, "as of the last look") for rank in ranks]
