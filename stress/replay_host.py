# SPDX-License-Identifier: Apache-2.0
"""Replays between CPU processes: forks a process per rank and watches their page."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

from stress import worker
from stress.host_outcome import Fate, outcome_of
from stress.page import Field, State, StatusPage
from stress.plan import MAX_BYTES, Plan, PlanConfig, shape_for
from stress.run import Outcome, Progress, RunConfig
from stress.watchdog import GRACE_S

NUM_SMALL, NUM_BIG = 64, 8
POLL_S = 0.05
NOTICE_S = 5.0  # a rank reports a peer within its timeout and this, on a busy machine too
# Above the four megabytes of the big graphs a host gather takes a tenth of a second; the control needs none of them.
CONTROL_BYTES = 64 << 10
ENDED = (State.DONE, State.TIMED_OUT, State.UNSUPPORTED, State.FAILED, State.ALONE)


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
        # Where ranks meet has no name either: nothing is left, however the processes end.
        with os.fdopen(os.memfd_create("nvcomm-stress", os.MFD_CLOEXEC)) as file:
            processes = _fork(config, plan, page, Path(f"/proc/self/fd/{file.fileno()}"))
            try:
                reason = _watch(processes, config, page, progress)
                fates = [_fate(page, rank, process) for rank, process in enumerate(processes)]
            finally:
                _end(processes)
        return outcome_of(config, plan, page, reason, fates)

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


def is_stopped(pid: int | None) -> bool:
    """Whether a process stands still until it gets SIGCONT."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _fate(page: StatusPage, rank: int, process: ForkProcess) -> Fate:
    """What became of a rank's process."""
    state, code = page.state(rank), process.exitcode
    if process.is_alive() and is_stopped(process.pid):
        return Fate(f"process {process.pid} is stopped", gone=True)
    if process.is_alive():
        return Fate(f"process {process.pid} runs, {state.name.lower()}")
    if code is not None and code < 0:
        return Fate(f"process {process.pid} was killed by {signal.Signals(-code).name}", gone=True)
    if state not in ENDED:
        return Fate(f"process {process.pid} ended with code {code}", gone=True)
    if state is State.ALONE:
        return Fate(page.text(rank))
    return Fate("" if state is State.DONE else state.name.lower().replace("_", " "))
