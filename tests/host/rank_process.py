# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, for test_processes.py: `python rank_process.py SCENARIO WORLD_SIZE STORE`.

One process imports torch, forks a rank each, and ends with 0 if every rank did what its scenario expects. A rank that
fails prints why.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nvcomm.errors import CapabilityError, GroupError, PeerTimeoutError
from nvcomm.group import StoreGroup
from nvcomm.host import HostEngine, open_memory
from nvcomm.host.steps import Row
from nvcomm.host.waiting import Waiting
from tests.host.forked import run_scenario

TIMEOUT_S = 1.0
LONG_S = 60.0  # that nobody waits for, however busy the machine
GONE_S = 4.0  # for a rank that is gone: longer than one that is there may be late
SEED = 20_251


def words(rank: int, call: int, size: int) -> torch.Tensor:
    """Payload of a call; one in eight is a reserved word."""
    numbers = np.random.default_rng([SEED, rank, call])
    bits = numbers.integers(0, 1 << 32, -(-size // 4), np.uint32)
    bits[:: numbers.integers(1, 9)] = np.uint32(0xFFFAFFFA) + np.uint32(call % 2)
    return torch.from_numpy(bits.view(np.uint8)[:size].copy())


def gather_and_compare(engine: HostEngine, call: int, size: int) -> None:
    out = torch.empty((engine.world_size, size), dtype=torch.uint8)
    engine.all_gather(words(engine.rank, call, size), out)
    for rank, row in enumerate(out):
        assert torch.equal(row, words(rank, call, size)), (call, size, rank)


def meet_before_waiting(engine: HostEngine, present: StoreGroup) -> None:
    """In its next call this rank begins to wait once all of `present` have sent: only who is missing is late."""
    steps = engine._steps
    collect = steps.collect

    def met(rows: list[Row], waiting: Waiting) -> None:
        steps.collect = collect  # type: ignore[method-assign]
        present.barrier("sent", LONG_S)
        collect(rows, waiting)

    steps.collect = met  # type: ignore[method-assign]


def others(group: StoreGroup, name: str) -> StoreGroup:
    """A group of all ranks but rank 1."""
    ranks = [rank for rank in range(group.world_size) if rank != 1]
    return StoreGroup(group._store, ranks.index(group.rank), len(ranks), name)


def gathers(group: StoreGroup) -> None:
    """Sizes grow and shrink; the count wraps; memory and descriptors are given back."""
    sizes = [0, 1, 3, 16, 17, 512, 4096, 65536, 1 << 20, 17, 4096, 16]
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    memory, layout = open_memory(group, 1 << 20, LONG_S)
    with memory, HostEngine(memory, layout, group, timeout_s=LONG_S, generation=(1 << 32) - 2) as engine:
        for call in range(3 * len(sizes)):
            gather_and_compare(engine, call, sizes[call % len(sizes)])
        group.barrier("end", LONG_S)
        audit = engine.audit()
        assert audit.dirty_words == 0
        assert (
            group.exchange("place", [audit.slot, audit.generation], LONG_S)
            == [[audit.slot, audit.generation]] * group.world_size
        )
        group.barrier("audited", LONG_S)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    assert "memfd:nvcomm" not in Path("/proc/self/maps").read_text()


def killed(group: StoreGroup) -> None:
    """Rank 1 is killed in mid-collective; the others name it, reset() fails, and they go on without it."""
    memory, layout = open_memory(group, 4096, LONG_S)
    with memory, HostEngine(memory, layout, group, timeout_s=LONG_S) as engine:
        for call in range(20):
            gather_and_compare(engine, call, 64)
        engine._port.timeout_s = TIMEOUT_S
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        survivors = others(group, "survivors")
        meet_before_waiting(engine, survivors)
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as timeout:
            gather_and_compare(engine, 20, 64)
        assert TIMEOUT_S <= time.monotonic() - started < LONG_S
        error = timeout.value
        assert (error.src_rank, error.root_rank, error.generation, error.slot) == (1, 1, 20, 0)
        survivors.barrier("all were told", LONG_S)
        with pytest.raises(GroupError) as gone:
            engine.reset(GONE_S)
        assert gone.value.missing == (1,)
    again = others(group, "again")
    memory, layout = open_memory(again, 4096, LONG_S)
    with memory, HostEngine(memory, layout, again, timeout_s=LONG_S) as engine:
        for call in range(20):
            gather_and_compare(engine, call, 64)
        assert engine.audit().dirty_words == 0
        again.barrier("end", LONG_S)


def stopped(group: StoreGroup) -> None:
    """Rank 1 stops until the others have given up, goes on, and reset() brings all of them back."""
    memory, layout = open_memory(group, 4096, LONG_S)
    with memory, HostEngine(memory, layout, group, timeout_s=LONG_S) as engine:
        pids = group.exchange("pid", os.getpid(), LONG_S)
        engine._port.timeout_s = TIMEOUT_S
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            present = others(group, "present")
            meet_before_waiting(engine, present)
        with pytest.raises(PeerTimeoutError) as timeout:  # noqa: PT012
            gather_and_compare(engine, 0, 64)
            gather_and_compare(engine, 1, 64)
        assert group.rank == 1 or timeout.value.root_rank == 1
        if group.rank != 1:
            present.barrier("all have given up", LONG_S)
        if group.rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)  # type: ignore[call-overload]
        engine._port.timeout_s = LONG_S
        engine.reset()
        for call in range(50):
            gather_and_compare(engine, call, 100)
        group.barrier("end", LONG_S)
        assert engine.audit().dirty_words == 0
        group.barrier("audited", LONG_S)


def disagree(group: StoreGroup) -> None:
    """Ranks that disagree get one error, the same everywhere."""
    with pytest.raises(CapabilityError, match="max_bytes: rank 0: 4096, rank 1: 8192") as caught:
        open_memory(group, 4096 << (group.rank == 1), LONG_S)
    assert len(set(map(str, group.exchange("text", str(caught.value), LONG_S)))) == 1
    group.barrier("end", LONG_S)


SCENARIOS = {"gathers": gathers, "killed": killed, "stopped": stopped, "disagree": disagree}


if __name__ == "__main__":
    sys.exit(run_scenario(SCENARIOS))
