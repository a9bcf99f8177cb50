# SPDX-License-Identifier: Apache-2.0
"""The faults of the host world: a process per rank, so that one can be stopped or killed in mid-collective."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from stress.faults import host_rank
from stress.faults import host_work as work
from stress.faults.common import EVERY_RANK, FIRST, GOES_ON, TIMED_OUT, absences, disagreements, wraps
from stress.faults.host_scene import LIMIT_S, TIMEOUT_S
from stress.faults.host_work import Work
from stress.faults.table import CALLS_BEFORE, NEW_GROUP, ODD_RANK, SUCCESS, Fault, Row, Sight, row_of
from stress.replay_host import is_stopped

ATTEMPTS = 5

FAULTS: tuple[Fault[Work], ...] = (
    *absences(work.never_arrives, work.one_call_fewer, work.raises_between_calls),
    Fault(
        "ends its program between two calls",
        replace(TIMED_OUT, then=NEW_GROUP), work.leaves_between_calls, lost=True,
    ),
    Fault(
        "is stopped (SIGSTOP) and continued in time",
        GOES_ON, work.signals_itself(signal.SIGSTOP, in_time=True), EVERY_RANK,
    ),
    Fault(
        "is stopped (SIGSTOP) for longer than the timeout",
        TIMED_OUT, work.signals_itself(signal.SIGSTOP), continued_after_s=1.4 * TIMEOUT_S,
    ),
    Fault(
        "is stopped in mid-collective for longer than the timeout",
        replace(TIMED_OUT, places=(FIRST, (CALLS_BEFORE + 1, 0))),
        work.signals_itself_between_stores(signal.SIGSTOP), continued_after_s=1.4 * TIMEOUT_S,
    ),
    Fault(
        "is killed (SIGKILL) between two calls",
        replace(TIMED_OUT, then=NEW_GROUP), work.signals_itself(signal.SIGKILL), lost=True,
    ),
    Fault(
        "is killed (SIGKILL) in mid-collective",
        replace(TIMED_OUT, places=(FIRST, (CALLS_BEFORE + 1, 0)), then=NEW_GROUP),
        work.signals_itself_between_stores(signal.SIGKILL), lost=True,
    ),
    Fault(
        "is interrupted (SIGINT) in mid-collective",
        replace(TIMED_OUT, places=((CALLS_BEFORE + 1, 0),)), work.interrupted,
    ),
    *disagreements(work.other_tensor, work.other_operation),
    Fault("calls from two threads at once", replace(GOES_ON, result="UsageError"), work.overlapping_threads, (0,)),
    *wraps(work.many_calls, work.never_arrives),
)  # fmt: skip


def run(fault: Fault[Work]) -> Row:
    """Runs one fault between processes of its own; again where it was only too late, as on a busy machine."""
    for _ in range(ATTEMPTS):
        row = _run_once(fault)
        if not row.only_late:
            break
    return row


def _run_once(fault: Fault[Work]) -> Row:
    with tempfile.TemporaryDirectory(prefix="nvcomm-faults-") as folder:
        context = multiprocessing.get_context("fork")
        checks = {"NVCOMM_DEVICE_CHECKS": str(int(fault.device_checks))}
        with mock.patch.dict(os.environ, checks):
            ranks = [context.Process(target=host_rank.main, args=(fault, rank, Path(folder))) for rank in EVERY_RANK]
            for process in ranks:
                process.start()
        _wait(ranks, fault, Path(folder))
        sights = [_sight(Path(folder) / f"rank{rank}.json", process) for rank, process in enumerate(ranks)]
    if fault.lost:  # nobody expects anything of it
        sights[ODD_RANK] = Sight()
    return row_of(fault, sights, TIMEOUT_S)


def _wait(ranks: Sequence[BaseProcess], fault: Fault[Work], folder: Path) -> None:
    """Waits for the ranks to end; lets one that is stopped go on after a while, and after the others, if they end."""
    seen = [] if fault.expected.result == SUCCESS else [host_rank.over(folder, rank) for rank in fault.watched]
    deadline = time.monotonic() + LIMIT_S
    stopped_since: dict[int, float] = {}
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        for process in ranks:
            assert process.pid is not None
            if process.is_alive() and is_stopped(process.pid):
                since = stopped_since.setdefault(process.pid, time.monotonic())
                if time.monotonic() - since > fault.continued_after_s and all(path.exists() for path in seen):
                    os.kill(process.pid, signal.SIGCONT)
                    stopped_since.clear()
        time.sleep(0.01)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def _sight(path: Path, process: BaseProcess) -> Sight:
    if not path.exists():
        return Sight(problem=f"it left nothing behind, exit code {process.exitcode}")
    fields = json.loads(path.read_text())
    fields["places"] = tuple(tuple(place) for place in fields["places"])
    return Sight(**fields)
