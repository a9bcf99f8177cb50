# SPDX-License-Identifier: Apache-2.0
"""The faults of a virtual world: all ranks on one GPU, their graphs and streams driven by one process.

That process cannot lose a rank, but it can forget to launch one, and it can be stopped between two launches while the
GPU goes on: the kernels of the other ranks wait as they would for another machine.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from unittest import mock

import torch

import nvcomm
from nvcomm.errors import NvcommError
from nvcomm.virtual import VirtualWorld
from stress.faults import virtual_work as work
from stress.faults.common import (
    ANYTHING,
    EVERY_RANK,
    GOES_ON,
    MISMATCH,
    TIMED_OUT,
    WORDS,
    absences,
    disagreements,
    wraps,
)
from stress.faults.table import AS_BEFORE, CALLS_BEFORE, MORE_WORDS, RANKS, RESET, Fault, Row, Sight, row_of, sight_of
from stress.faults.virtual_scene import TIMEOUT_S, Scene
from stress.faults.virtual_work import Work

FAULTS: tuple[Fault[Work], ...] = (
    *absences(work.never_arrives, work.one_call_fewer, work.raises_between_calls),
    Fault("is stopped (SIGSTOP) and continued in time", GOES_ON, work.stopped_for(TIMEOUT_S / 4), EVERY_RANK),
    Fault("is stopped (SIGSTOP) for longer than the timeout", TIMED_OUT, work.stopped_for(TIMEOUT_S * 1.5)),
    *disagreements(work.other_tensor, work.other_operation),
    Fault("calls from two streams at once", GOES_ON, work.overlapping_streams, EVERY_RANK),
    Fault(
        "replays two graphs at once, device checks on",
        MISMATCH, work.overlapping_graphs, (0,), device_checks=True,
    ),
    Fault("replays two graphs at once, device checks off", ANYTHING, work.overlapping_graphs, (0,)),
    Fault("destroys its graph under way and captures again", GOES_ON, work.captured_again, EVERY_RANK),
    Fault("only replays graphs, and another rank never arrives", TIMED_OUT, work.graphs_without_a_rank),
    *wraps(work.right_calls, work.never_arrives),
)  # fmt: skip


def run(fault: Fault[Work]) -> Row:
    """Runs one fault in a world of its own."""
    sights = [Sight() for _ in EVERY_RANK]
    checks = {"NVCOMM_DEVICE_CHECKS": str(int(fault.device_checks))}
    with (
        mock.patch.dict(os.environ, checks),
        nvcomm.virtual_world(RANKS, timeout_s=TIMEOUT_S, generation=fault.generation) as world,
    ):
        xs = [torch.full((WORDS,), 1 + rank, dtype=torch.int32, device="cuda") for rank in EVERY_RANK]
        outs = [torch.zeros((RANKS, WORDS), dtype=torch.int32, device="cuda") for _ in EVERY_RANK]
        floats = (torch.ones(WORDS, device="cuda"), torch.zeros(WORDS, device="cuda"))
        scene = Scene(world, xs, outs, floats)
        if fault.work is work.other_operation:  # a load waits for the device (R9)
            world.prepare("all_reduce", torch.float32)
        torch.cuda.synchronize()
        for _ in range(CALLS_BEFORE):
            scene.gather()
        torch.cuda.synchronize()
        watchers = [comm.watch(functools.partial(scene.reported.__setitem__, comm.rank), 0.01) for comm in world]
        started = time.perf_counter()
        try:
            fault.work(scene)
        except NvcommError as error:
            raise AssertionError(f"{fault.name}: the call itself raised {error}") from error
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        time.sleep(0.1)  # for the watchers
        for watcher in watchers:
            watcher.close()
        for rank, comm in enumerate(world):
            sights[rank] = sight_of(comm.engine.fault(), seconds)
            told = sight_of(scene.reported.get(rank), seconds)
            if told != sights[rank]:
                sights[rank] = replace(sights[rank], problem=f"its watcher was told {told}")
        then, problem = _go_on(world)
        for rank, sight in enumerate(sights):
            sights[rank] = replace(sight, then=then, problem="; ".join(filter(None, (sight.problem, problem))))
    return row_of(fault, sights, TIMEOUT_S)


def _go_on(world: VirtualWorld) -> tuple[str, str]:
    """Brings the ranks together if one is broken, compares `MORE_WORDS` words on each, audits; what was wrong."""
    if int(torch.ones(1000, device="cuda").sum()) != 1000:
        return "", "the CUDA context is unusable"
    audits = [comm.audit() for comm in world]
    broken = any(comm.engine.fault() for comm in world)
    apart = any(audit != audits[0] or audit.dirty_words for audit in audits)
    if broken or apart:
        world.reset()
    sizes = (4096, 60000, 1, 1 << 17)
    compared = call = wrong = 0
    while compared < MORE_WORDS:
        size = sizes[call % len(sizes)]
        index = torch.arange(size, device="cuda", dtype=torch.int32)
        xs = [index * 8 + rank + (call << 24) for rank in range(len(world))]
        want = torch.stack(xs)
        wrong += sum(int((y != want).sum()) for y in world.all_gather(xs))
        compared += want.numel()
        call += 1
    if wrong:
        return "", f"{wrong} wrong words afterwards"
    for comm in world:
        comm.check()
    audits = [comm.audit() for comm in world]
    if any(audit != audits[0] or audit.dirty_words for audit in audits):
        return "", f"mailboxes afterwards: {audits}"
    return (RESET if broken or apart else AS_BEFORE), ""
