# SPDX-License-Identifier: Apache-2.0
"""The watcher: it reports each break once, from its own thread, and ends with the communicator."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import nvcomm
from nvcomm.watcher import Watcher

TIMEOUT_S, LONG_S = 0.2, 30.0


def wait_until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def break_it(world):
    """Rank 1 does not come. Rank 0 is in no hurry but here: on a busy machine a reset may take seconds."""
    port = world[0].engine._port
    port.timeout_s = TIMEOUT_S
    with pytest.raises(nvcomm.PeerTimeoutError):
        world.run(lambda comm: comm.all_gather(torch.ones(4)) if comm.rank == 0 else None)
    port.timeout_s = LONG_S


def test_each_break_is_reported_once_and_reset_rearms():
    seen = []
    with nvcomm.virtual_world(2, "cpu", timeout_s=LONG_S) as world:
        with world[0].watch(lambda error: seen.append((error, threading.current_thread().name)), 0.01):
            time.sleep(0.05)
            assert not seen
            for count in (1, 2):
                break_it(world)
                wait_until(lambda count=count: len(seen) == count)
                time.sleep(0.05)
                assert len(seen) == count
                world.reset()
        break_it(world)
        time.sleep(0.05)
    assert [type(error) for error, _ in seen] == [nvcomm.PeerTimeoutError] * 2
    assert seen[0][0].root_rank == 1
    assert seen[0][1] == "nvcomm-watcher"
    assert seen[1][0].generation > seen[0][0].generation


def test_what_on_fault_raises_ends_nothing(caplog):
    calls = []

    def raises(error):
        calls.append(error)
        raise ArithmeticError

    with nvcomm.virtual_world(2, "cpu", timeout_s=LONG_S) as world, world[0].watch(raises, 0.01):
        for count in (1, 2):
            break_it(world)
            wait_until(lambda count=count: len(calls) == count)
            world.reset()
    assert "on_fault raised" in caplog.text


def test_it_ends_with_the_communicator_and_from_inside():
    world = nvcomm.virtual_world(2, "cpu", timeout_s=LONG_S)
    watcher = world[0].watch(lambda error: watcher.close(), 0.01)
    other = world[1].watch(print, 0.01)
    break_it(world)
    wait_until(lambda: not watcher._thread.is_alive())
    world.close()
    wait_until(lambda: not other._thread.is_alive())
    watcher.close()
    other.close()


def test_an_interval_of_nothing_is_refused():
    with nvcomm.virtual_world(1, "cpu") as world, pytest.raises(nvcomm.UsageError, match="interval_s is 0"):
        Watcher(world[0], print, 0)
