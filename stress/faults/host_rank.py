# SPDX-License-Identifier: Apache-2.0
"""One rank of a fault between processes: right calls, the fault, what it saw of it, and whether it could go on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nvcomm.errors import NvcommError
from nvcomm.group import StoreGroup
from stress.faults.host_recovery import go_on, go_on_without
from stress.faults.host_scene import LIMIT_S, Scene
from stress.faults.host_work import Work
from stress.faults.table import CALLS_BEFORE, RANKS, UNDEFINED, Fault, Sight, sight_of

_PR_SET_PDEATHSIG = 1


def main(fault: Fault[Work], rank: int, folder: Path) -> None:
    """A rank's whole life, in its own process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank survives its parent
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sight = _live(fault, rank, folder)
    except BaseException:  # the parent reports it
        sight = Sight(problem=traceback.format_exc(limit=3).replace("\n", " / "))
    (folder / f"rank{rank}.tmp").write_text(json.dumps(asdict(sight)))
    (folder / f"rank{rank}.tmp").rename(folder / f"rank{rank}.json")
    os._exit(0)


def _live(fault: Fault[Work], rank: int, folder: Path) -> Sight:
    store = dist.FileStore(str(folder / "store"), RANKS)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    group = StoreGroup(store, rank, RANKS, "faults")
    scene = Scene(group, fault.generation)
    with scene.comm, scene.comm.watch(scene.reported.append, 0.02):
        for _ in range(CALLS_BEFORE):
            scene.gather()
        group.barrier("before", LIMIT_S)
        started = time.monotonic()
        error: NvcommError | None = None
        try:
            with scene.short_waits() if fault.expected.result == UNDEFINED else contextlib.nullcontext():
                fault.work(scene)
        except NvcommError as caught:
            error = caught
        sight = sight_of(error, time.monotonic() - started)
        over(folder, rank).touch()
        broken = scene.comm.engine.fault()
        deadline = time.monotonic() + LIMIT_S
        while broken and not scene.reported and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for one report too many
        told = [str(one) for one in scene.reported]
        if told != ([] if broken is None else [str(broken)]):
            return replace(sight, problem=f"its watcher was told {told}; it broke by {broken!r}")
        then, problem = go_on_without(scene, store) if fault.lost else go_on(scene)
    return replace(sight, then=then, problem=problem)


def over(folder: Path, rank: int) -> Path:
    """Exists once the fault is over for a rank."""
    return folder / f"rank{rank}.over"
