# SPDX-License-Identifier: Apache-2.0
"""One run on the GPU of this process: its ranks replay the plan, and what all processes saw becomes the outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nvcomm.errors import GroupError, PeerTimeoutError
from stress import sum_oracle
from stress.drive import Driver
from stress.emulated_sum_rank import EmulatedSumRank
from stress.gpu_facts import collect_facts, find_positions, find_waits, last_seen, merge_facts
from stress.gpu_rank import GpuRank
from stress.hang import Hang
from stress.plan import MAX_BYTES, SMALL_BYTES, Plan, PlanConfig, shape_for
from stress.processes import Alone, Others
from stress.run import Outcome, Progress, RunConfig
from stress.sum_rank import SumRank
from stress.watchdog import GRACE_S, Watchdog

REPLAYS_PER_GRAPH = 8
NUM_SMALL, NUM_BIG = 96, 8
# A control needs changing sizes and no more: few graphs, quickly captured.
CONTROL_SMALL = 24

# Takes what is known then, writes the report, returns the exit code.
OnHang = Callable[[RunConfig, Outcome], int]


def plan_for(config: RunConfig) -> Plan:
    """The plan of a run on GPUs."""
    small, big, max_bytes = (CONTROL_SMALL, 0, SMALL_BYTES) if config.stop_on_bad else (NUM_SMALL, NUM_BIG, MAX_BYTES)
    shape = shape_for(config.protocol, is_control=config.stop_on_bad)
    return Plan(PlanConfig(config.seed, config.ranks, REPLAYS_PER_GRAPH, small, big, max_bytes, **shape))


def replay(
    comms: Sequence[Any],
    streams: Sequence[torch.cuda.Stream],
    config: RunConfig,
    progress: Progress,
    on_hang: OnHang,
    others: Alone | Others,
) -> Outcome:
    """Replays on this process's communicators, and puts together what all processes saw."""
    plan = plan_for(config)
    ranks: list[GpuRank] = []

    def explain(reason: str) -> Hang:
        return Hang(reason, tuple(find_waits(comms)), tuple(find_positions(ranks)))

    def look(stop: bool) -> bool:
        for comm in comms:
            comm.check()
        return others.agree(stop)

    launched, seconds, reason = None, 0.0, None
    with contextlib.ExitStack() as cleanup:
        limit_s = config.timeout_s + GRACE_S
        with Watchdog(limit_s, explain, lambda hang: on_hang(config, last_seen(ranks, hang))) as watchdog:
            for comm, stream in zip(comms, streams, strict=True):
                ranks.append(_rank(config, comm, plan, stream))
                cleanup.callback(ranks[-1].close)
                ranks[-1].load()
                watchdog.beat()
            try:
                launches, seconds = Driver(ranks, plan, watchdog, look).run(config, progress)
                launched = launches * REPLAYS_PER_GRAPH
            except (PeerTimeoutError, GroupError) as error:  # GroupError: another process left
                reason = str(error)
            facts = collect_facts(comms, ranks, reason)
        outcome = merge_facts(others.gather(facts), config.ranks, launched, seconds)
    return replace(outcome, missing=sum_oracle.missing(config.op, plan.sizes_of(outcome.replays)))


def _rank(config: RunConfig, comm: Any, plan: Plan, stream: torch.cuda.Stream) -> GpuRank:
    if config.op == "all_gather":
        return GpuRank(comm, plan, comm.device, stream)
    kind = SumRank if config.protocol == "mailbox" else EmulatedSumRank
    return kind(comm, plan, comm.device, stream, config.op)
