# SPDX-License-Identifier: Apache-2.0
"""Replays between CPU processes: forks a process per rank, watches their page, puts together what they saw."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from nvcomm.errors import NvcommError, UnsupportedError
from stress import host_sums, sum_oracle, worker
from stress.audit import audit_ranks
from stress.decode import BadWord, Origin, decode
from stress.hang import Hang, Position, Wait
from stress.page import Field, State, StatusPage
from stress.plan import MAX_BYTES, Plan, PlanConfig, shape_for
from stress.run import Outcome, Progress, RunConfig
from stress.watchdog import GRACE_S

NUM_SMALL, NUM_BIG = 64, 8
POLL_S = 0.05
NOTICE_S = 5.0  # a rank reports a peer within its timeout and this, on a busy machine too
# Above the four megabytes of the big graphs a host gather takes a tenth of a second; the control needs none of them.
CONTROL_BYTES = 64 << 10
ENDED = (State.DONE, State.TIMED_OUT, State.UNSUPPORTED, State.FAILED)


class RankFailedError(NvcommError):
    """A rank raised something that it should not; the message is its traceback."""


class HostRunner:
    """All ranks are processes of this host."""

    reports = True

    def agreed(self, config: RunConfig) -> RunConfig:
        """See `Runner.agreed`: the ranks are forked from one process."""
        return config

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        """See `Runner.run`."""
        plan = plan_for(config)
        page = StatusPage(config.ranks)
        with tempfile.TemporaryDirectory(prefix="nvcomm-stress-") as folder:
            processes = _fork(config, plan, page, Path(folder) / "store")
            try:
                reason = _watch(processes, config, page, progress)
                notes = [_note(page.state(rank), process) for rank, process in enumerate(processes)]
            finally:
                _end(processes)
        return _outcome(config, plan, page, reason, notes)

    def close(self) -> None:
        """Nothing outlives a run."""


def plan_for(config: RunConfig) -> Plan:
    """The plan of a run between processes: one replay a graph."""
    num_big, max_bytes = (0, CONTROL_BYTES) if config.stop_on_bad else (NUM_BIG, MAX_BYTES)
    shape = shape_for(config.protocol, is_control=config.stop_on_bad)
    return Plan(PlanConfig(config.seed, config.ranks, 1, NUM_SMALL, num_big, max_bytes, **shape))


def _fork(config: RunConfig, plan: Plan, page: StatusPage, rendezvous: Path) -> list[ForkProcess]:
    """Forked, not spawned: the page is shared by inheritance, and nothing is imported again."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=worker.main, args=(rank, config, plan, page, rendezvous), name=f"rank {rank}")
        for rank in range(config.ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _watch(processes: list[ForkProcess], config: RunConfig, page: StatusPage, progress: Progress) -> str | None:
    """Returns when every rank has ended, or a control has seen enough; with a reason when nothing moves any more."""
    limit_s = config.timeout_s + GRACE_S
    last_change, last_seen, first_death = time.monotonic(), None, None
    while any(process.is_alive() for process in processes):
        time.sleep(POLL_S)
        now = time.monotonic()
        progress.show(int(page.lines[:, Field.REPLAY].min()), int(page.lines[:, Field.BAD_WORDS].sum()))
        seen = page.lines[:, : Field.GATHERS + 1].tolist()
        if seen != last_seen:
            last_change, last_seen = now, seen
        ended_badly = [
            rank
            for rank, process in enumerate(processes)
            if page.state(rank) in ENDED[1:] or (not process.is_alive() and page.state(rank) not in ENDED)
        ]
        if ended_badly and first_death is None:
            first_death = now
        if config.stop_on_bad and page.lines[:, Field.BAD_WORDS].any():
            return None  # ranks of a wrong protocol run apart: they would wait for each other in vain
        # The others get their timeout to notice by themselves: their reports say who waits for whom.
        if first_death is not None and now - first_death > config.timeout_s + NOTICE_S:
            return f"rank {ended_badly[0]} ended, and others had not {now - first_death:.1f} s later"
        setting_up = any(page.state(rank) is State.SETUP for rank in range(config.ranks))
        if now - last_change > (max(limit_s, worker.SETUP_S + GRACE_S) if setting_up else limit_s):
            return f"no rank made progress for {now - last_change:.1f} s"
    return None


def _end(processes: list[ForkProcess]) -> None:
    """Ends what is still there. SIGKILL: a stopped process hears nothing else."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()


def _note(state: State, process: ForkProcess) -> str:
    """What became of a rank's process."""
    if process.is_alive():
        return f"process {process.pid} runs, {state.name.lower()}"
    code = process.exitcode
    if code is not None and code < 0:
        return f"process {process.pid} was killed by {signal.Signals(-code).name}"
    if state not in ENDED:
        return f"process {process.pid} ended with code {code}"
    return "" if state is State.DONE else state.name.lower().replace("_", " ")


def _outcome(config: RunConfig, plan: Plan, page: StatusPage, reason: str | None, notes: list[str]) -> Outcome:
    states = [page.state(rank) for rank in range(config.ranks)]
    for rank, state in enumerate(states):
        if state is State.UNSUPPORTED:
            raise UnsupportedError(page.text(rank))
    for rank, state in enumerate(states):
        if state is State.FAILED:
            raise RankFailedError(f"rank {rank} failed:\n{page.text(rank)}")
    hang = None
    stopped_by_us = config.stop_on_bad and bool(page.lines[:, Field.BAD_WORDS].any())
    if any(state is not State.DONE for state in states) and not stopped_by_us:
        hang = _hang(page, reason, notes)
    lines = page.lines
    facts: list[dict[str, Any]] = []
    audit: tuple[str, ...] = ()
    if set(states) == {State.DONE}:
        facts = [json.loads(page.text(rank)) for rank in range(config.ranks)]
        counts = lines[:, Field.REPLAY].tolist(), lines[:, Field.GATHERS].tolist()
        launched = config.replays if config.duration_s is None else None
        audit = tuple(audit_ranks(config.ranks, *counts, [fact["audit"] for fact in facts], launched))
    ends = [line[Field.ENDED_NS] or time.monotonic_ns() for line in lines]
    replays = int(lines[:, Field.REPLAY].min())
    return Outcome(
        replays=replays,
        gathers=int(lines[:, Field.GATHERS].min()),
        bad_words=int(lines[:, Field.BAD_WORDS].sum()),
        first_bad=_first_bad(plan, config.op, page),
        seconds=float(max(ends) - lines[:, Field.STARTED_NS].min()) / 1e9,
        audit=audit,
        stats=tuple(fact["stats"] for fact in facts),
        hang=hang,
        missing=sum_oracle.missing(config.op, plan.sizes_of(replays)),
    )


def _hang(page: StatusPage, reason: str | None, notes: list[str]) -> Hang:
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
        positions.append(Position(rank, values[Field.REPLAY], values[Field.GATHER], notes[rank]))
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
