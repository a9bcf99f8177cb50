# SPDX-License-Identifier: Apache-2.0
"""A group's exchange ends by its deadline where a call of the store never returns, and so does the process.

Run as a program (`SCENARIO FOLDER`) it forks the ranks of one scenario and tells, as JSON, how each of them ended.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from nvcomm.errors import GroupError
from nvcomm.group import StoreGroup, begin, exchange, from_environment, store_group
from tests.threads import together

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.5
EXIT_LIMIT_S = 60.0
KILL_AFTER_S = 3.0
LONG_S = 40.0  # that nobody waits for, however busy the machine


class Gate:
    """A store one of whose calls does not return before it may."""

    def __init__(self, held):
        self._store = dist.HashStore()
        self._held = held
        self.open = threading.Event()

    def __getattr__(self, name):
        def call(*args):
            if name == self._held:
                assert self.open.wait(2 * LONG_S)
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("held", ["set", "check", "get"])
def test_an_exchange_ends_whichever_call_does_not(held):
    store = Gate(held)
    group = StoreGroup(store, 0, 2, "test")
    started = time.monotonic()
    with pytest.raises(GroupError, match="waited at 'x' for rank 1 of 2, in vain: a call of the group's") as caught:
        group.exchange("x", 1, 0.1)
    assert caught.value.missing == (1,)
    # The next one does not join those that wait, and the one after the store came back goes on.
    with pytest.raises(GroupError, match="waited at 'x'"):
        group.exchange("y", 1, LONG_S)
    assert time.monotonic() - started < LONG_S
    store.open.set()
    _ends(group)
    other = StoreGroup(store, 1, 2, "test")
    other._sequence = 1
    assert together([lambda: group.exchange("z", 0, LONG_S), lambda: other.exchange("z", 1, LONG_S)]) == [[0, 1]] * 2


def test_ranks_that_answered_before_the_store_hung_are_not_missed():
    store = Gate("get")
    store.open.set()
    group = StoreGroup(store, 0, 3, "test")
    told = json.dumps({"tag": "x", "world_size": 3, "value": 2})
    store.set("test/0/2", told)

    def close_after_it_was_read():
        while group._under_way is None or 2 not in group._under_way[0]._seen:
            time.sleep(1e-3)
        store.open.clear()
        store.set("test/0/1", told)

    results = together([lambda: group.exchange("x", 0, 3.0), close_after_it_was_read])
    assert isinstance(results[0], GroupError)
    assert results[0].missing == (1,)
    store.open.set()
    _ends(group)


def test_answers_count_where_only_the_tidying_hangs():
    store = Gate("add")
    group = StoreGroup(store, 0, 1, "test")
    assert group.exchange("x", 5, 2.0) == [5]
    store.open.set()
    _ends(group)


def test_a_new_group_of_a_store_that_hangs_or_fails():
    store = Gate("add")
    started = time.monotonic()
    with pytest.raises(GroupError, match="rank 0 waited for the group's store in vain. Find out whether"):
        begin.fresh_group(store, 0, 1, 0.1)
    assert time.monotonic() - started < LONG_S
    store.open.set()
    assert begin.fresh_group(store, 0, 1, LONG_S)._prefix in ("nvcomm/1", "nvcomm/2")

    class Broken:
        def add(self, key, count):
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(GroupError, match="rank 3 cannot use the group's store: connection reset"):
        begin.fresh_group(Broken(), 3, 4, 1.0)


@pytest.fixture(scope="module")
def server_process():
    """The process of a TCPStore, and its port. One for all tests: a fork beside a call that just failed may hang."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(served.port).encode())
            time.sleep(600)
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield pid, int(os.read(read, 8))
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def server(server_process):
    """The same, set going again behind the test: what a call left behind ends."""
    yield server_process
    os.kill(server_process[0], signal.SIGCONT)


def test_a_server_that_was_stopped(server):
    """The process that serves a TCPStore stands still, as under a debugger: torch's own timeout does not see it."""
    pid, port = server
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    assert StoreGroup(store, 0, 1, "alone").exchange("x", 1, LONG_S) == [1]
    group = StoreGroup(store, 0, 2, "test")
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(GroupError, match="Find out whether the process that serves the store runs") as caught:
        group.exchange("x", 1, TIMEOUT_S)
    assert caught.value.missing == (1,)
    assert time.monotonic() - started < LONG_S


def test_a_server_that_stands_still_when_a_launched_rank_comes(server, monkeypatch):
    pid, port = server
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(GroupError, match="MASTER_PORT does not answer"):
        from_environment(TIMEOUT_S)
    assert time.monotonic() - started < LONG_S


def test_a_file_that_was_cut_off(tmp_path):
    """Rank 1's answer does not fit the disk: it says so, the others do in time, and every process can end."""
    ranks = _run("cut_off", tmp_path)
    # A thread that was left behind in the store, and comes back while its process ends, takes that down: Python before
    # 3.14 ends such a thread from inside C++, which answers by abort(). It has ended all the same.
    assert {rank["code"] for rank in ranks} <= {0, -signal.SIGABRT}, ranks
    assert "rank 1 cannot write to the group's store" in ranks[1]["error"]
    assert "File too large" in ranks[1]["error"]
    for rank in (0, 2):
        assert f"rank {rank} waited at 'cut off' for rank " in ranks[rank]["error"]
        assert f"If {tmp_path / 'store'} ends inside a record" in ranks[rank]["error"]
        assert 1 in ranks[rank]["missing"]
        assert rank not in ranks[rank]["missing"]
        assert ranks[rank]["seconds"] < TIMEOUT_S + exchange.LAST_LOOK_S + LONG_S


def test_control_without_the_guard_they_hang(tmp_path):
    ranks = _run("unguarded", tmp_path)
    assert [rank["code"] for rank in ranks] == [-signal.SIGKILL] * 3, ranks
    # Two in the exchange; the one that could tell what went wrong, at its end.
    assert ["error" in rank for rank in ranks] == [False, True, False]


def _ends(group):
    """Leaves no thread in a store behind."""
    if group._under_way is not None:
        assert group._under_way[1].ended(LONG_S)


def _run(scenario, folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_store_that_hangs", scenario, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class AtOnce:
    """In place of `BoundedCall`: on the caller's own thread."""

    def __init__(self, call, name):
        self.result = call

    def ended(self, timeout_s=0.0):
        return True


def _rank(rank, folder):
    """One rank: its answer to the second exchange is cut off if it is rank 1. Tells what came of it."""
    store = dist.FileStore(str(folder / "store"), 3)
    group = StoreGroup(store, rank, 3, "test")
    group.barrier("start", LONG_S)
    # Nobody is in the store any more when rank 1 spoils it.
    (folder / f"ready{rank}").touch()
    while rank == 1 and not all((folder / f"ready{other}").exists() for other in (0, 2)):
        time.sleep(1e-3)
    if rank == 1:
        limit = (folder / "store").stat().st_size + 4000  # the others' answers, and the beginning of this one's
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    started = time.monotonic()
    try:
        group.exchange("cut off", "x" * (50_000 if rank == 1 else 1), TIMEOUT_S)
    except GroupError as error:
        told = {"error": str(error), "missing": error.missing, "seconds": time.monotonic() - started}
        (folder / f"rank{rank}").write_text(json.dumps(told))


def _all_ranks(scenario, folder):
    """Forks the ranks; the parent returns how each ended, a rank returns None and ends as a program does."""
    if scenario == "unguarded":
        store_group.BoundedCall = AtOnce
        exchange.never_destroy = lambda store: None
    ranks = []
    for rank in range(3):
        ranks.append(os.fork())
        if not ranks[-1]:
            _rank(rank, folder)
            return None
    codes = {}
    deadline = math.inf
    while len(codes) < 3:
        if deadline == math.inf and (folder / "rank1").exists():
            deadline = time.monotonic() + (EXIT_LIMIT_S if scenario == "cut_off" else KILL_AFTER_S)
        for rank, pid in enumerate(ranks):
            if rank not in codes and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            elif rank not in codes and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    told = [json.loads(path.read_text()) if (path := folder / f"rank{rank}").exists() else {} for rank in range(3)]
    return [{"rank": rank, "code": codes[rank], **told[rank]} for rank in range(3)]


if __name__ == "__main__":
    ended = _all_ranks(sys.argv[1], Path(sys.argv[2]))
    if ended is not None:
        sys.stdout.write(json.dumps(ended) + "\n")
