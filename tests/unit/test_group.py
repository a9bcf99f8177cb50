# SPDX-License-Identifier: Apache-2.0
"""Ranks find each other, tell each other bounded JSON, and never wait beyond the deadline."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from nvcomm.errors import CapabilityError, GroupError, UnsupportedError, UsageError
from nvcomm.group import (
    MAX_ANSWER_BYTES,
    StoreGroup,
    as_group,
    from_environment,
    from_mpi,
    from_process_group,
    local_groups,
    mpi,
)
from tests.threads import together

LONG_S = 40.0  # that nobody waits for, however busy the machine


def stores(kind, tmp_path, count):
    """One store object for each of `count` ranks."""
    if kind == "hash":
        return [dist.HashStore()] * count
    if kind == "file":
        return [dist.FileStore(str(tmp_path / "store"), count) for _ in range(count)]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(count - 1))]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_exchange_and_barrier_again_and_again(kind, tmp_path):
    count = 3
    groups = [StoreGroup(store, rank, count, "test") for rank, store in enumerate(stores(kind, tmp_path, count))]

    def work(ranks):
        for k in range(5):
            value = {"rank": ranks.rank, "k": k, "text": "ä", "list": [None, True, 1.5]}
            answers = ranks.exchange("same tag", value, LONG_S)
            assert answers == [value | {"rank": rank} for rank in range(count)]
            ranks.barrier("barrier", LONG_S)

    assert together([lambda ranks=ranks: work(ranks) for ranks in groups]) == [None] * count


def test_the_store_does_not_grow():
    store = dist.HashStore()
    groups = [StoreGroup(store, rank, 3, "test") for rank in range(3)]
    for _ in range(20):
        together([lambda ranks=ranks: ranks.barrier("here", LONG_S) for ranks in groups])
    assert store.num_keys() == 0


def test_missing_ranks_are_named_within_the_deadline():
    groups, present = local_groups(4), threading.Barrier(2)

    def work(ranks):
        present.wait(LONG_S)
        ranks.barrier("start", 2.0)

    started = time.monotonic()
    results = together([lambda ranks=ranks: work(ranks) for ranks in groups[::2]])
    assert 2.0 <= time.monotonic() - started < LONG_S
    for rank, error in zip((0, 2), results, strict=True):
        assert isinstance(error, GroupError)
        assert error.missing == (1, 3)
        assert f"rank {rank} waited at 'start' for rank 1, 3 of 4" in str(error)


def test_ranks_at_different_places_learn_it_at_once():
    first, second = local_groups(2)
    started = time.monotonic()
    results = together([lambda: first.barrier("one", LONG_S), lambda: second.barrier("other", LONG_S)])
    assert time.monotonic() - started < LONG_S
    assert "rank 0 is at 'one' while rank 1 is at 'other'" in str(results[0])
    assert "rank 1 is at 'other' while rank 0 is at 'one'" in str(results[1])


@pytest.mark.parametrize(
    "value", ["x" * MAX_ANSWER_BYTES, {1, 2}, float("nan"), b"bytes"], ids=["large", "set", "nan", "bytes"]
)
def test_what_is_no_bounded_json_is_refused_and_the_others_are_told(value):
    first, second = local_groups(2)
    started = time.monotonic()
    results = together([lambda: first.exchange("x", value, LONG_S), lambda: second.exchange("x", 1, LONG_S)])
    assert isinstance(results[0], UsageError)
    assert isinstance(results[1], GroupError)
    assert "rank 0 gave up" in str(results[1])
    assert time.monotonic() - started < LONG_S
    assert together([lambda: first.exchange("y", 1, LONG_S), lambda: second.exchange("y", 2, LONG_S)]) == [
        [1, 2],
        [1, 2],
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"\x80\x04]\x94.",
        b"{",
        b"[]",
        b"17",
        b"[" * 100_000,
        json.dumps({"tag": "x", "world_size": 1 << 40, "value": 1}).encode(),
        json.dumps({"tag": "x", "world_size": "2", "value": 1}).encode(),
        json.dumps({"tag": "x", "world_size": 2}).encode(),
        json.dumps({"tag": "x", "world_size": 2, "value": "x" * MAX_ANSWER_BYTES}).encode(),
    ],
    ids=lambda answer: answer[:12].decode("latin1"),
)
def test_an_answer_that_is_no_envelope_is_refused(answer):
    store = dist.HashStore()
    store.set("test/0/1", answer)
    with pytest.raises(GroupError, match="rank 1 answered"):
        StoreGroup(store, 0, 2, "test").exchange("x", 1, 5.0)


def test_ranks_that_disagree_on_the_world_size_all_get_the_same_error():
    store = dist.HashStore()
    groups = [StoreGroup(store, 0, 2, "test"), StoreGroup(store, 1, 3, "test"), StoreGroup(store, 2, 3, "test")]
    results = together([lambda ranks=ranks: ranks.barrier("start", LONG_S) for ranks in groups])
    # Rank 2 exists only for those who know of it, so all three are read before anybody speaks.
    assert [type(error) for error in results] == [CapabilityError] * 3
    assert len({str(error) for error in results}) == 1
    assert "world_size: rank 0: 2, rank 1: 3, rank 2: 3" in str(results[0])


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank, world_size):
    with pytest.raises(UsageError, match="outside"):
        StoreGroup(dist.HashStore(), rank, world_size, "test")


class FailingStore:
    """A store one of whose calls fails."""

    def __init__(self, failing):
        self._store = dist.HashStore()
        self._failing = failing

    def __getattr__(self, name):
        if name == self._failing:
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *args):
        raise dist.DistNetworkError("connection reset")


@pytest.mark.parametrize("call", ["set", "check", "get"])
def test_a_store_that_fails_is_a_group_error(call):
    with pytest.raises(GroupError, match="connection reset"):
        StoreGroup(FailingStore(call), 0, 1, "test").barrier("x", 1.0)


def test_who_had_not_answered_is_named_where_the_process_that_serves_the_store_is_gone():
    """Rank 0 served it and is gone; rank 1 had answered, so it is not to blame, whoever is read next."""

    class ServerGone(FailingStore):
        def check(self, keys):
            return self._fail() if keys == ["test/0/0"] and answered.is_set() else self._store.check(keys)

        def get(self, key):
            if key == "test/0/1":
                answered.set()
            return self._store.get(key)

    answered, store = threading.Event(), ServerGone(None)
    StoreGroup(store._store, 1, 4, "test")._store.set("test/0/1", json.dumps({"tag": "x", "world_size": 4, "value": 1}))
    with pytest.raises(GroupError) as caught:
        StoreGroup(store, 2, 4, "test").exchange("x", 1, LONG_S)
    assert caught.value.missing == (0, 3)
    for said in ("rank 2 waited at 'x' for rank 0, 3 of 4", "connection reset", "rank 0's, or torchrun's agent"):
        assert said in str(caught.value)


@pytest.mark.parametrize("serves", [True, False])
def test_who_serves_the_store_leaves_no_exchange_before_all_have_read_it(serves):
    """The others read late. Without the rule, which is the control, rank 0 and its store are gone by then."""
    store, left = dist.HashStore(), threading.Event()

    class LateReader:
        def __getattr__(self, name):
            if left.is_set():
                raise dist.DistNetworkError("connection reset")
            return getattr(store, name)

        def get(self, key):
            left.wait(0.2 if serves else LONG_S)
            return self.__getattr__("get")(key)

    def first():
        StoreGroup(store, 0, 3, "test", serves=serves).barrier("last", LONG_S)
        left.set()

    others = [StoreGroup(LateReader(), rank, 3, "test") for rank in (1, 2)]
    results = together([first, *(lambda ranks=ranks: ranks.barrier("last", LONG_S) for ranks in others)])
    assert results[0] is None
    assert [type(result) for result in results[1:]] == [type(None) if serves else GroupError] * 2


@pytest.mark.parametrize("call", ["add", "delete_key"])
def test_a_store_that_ends_after_the_exchange_does_no_harm(call):
    assert StoreGroup(FailingStore(call), 0, 1, "test").exchange("x", 5, 1.0) == [5]


def test_process_group_through_its_own_store(tmp_path):
    with pytest.raises(UsageError, match="not initialised"):
        from_process_group()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=10))
    try:
        first, second, third = as_group(None), from_process_group(), as_group(dist.group.WORLD)
        assert as_group(third) is third
        prefixes = {ranks._prefix for ranks in (first, second, third)}
        assert len(prefixes) == 3
        assert [ranks.exchange("x", k, 5.0) for k, ranks in enumerate((first, second, third))] == [[0], [1], [2]]
    finally:
        dist.destroy_process_group()


def test_environment_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        as_group(None)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun serves the store itself
    }.items():
        monkeypatch.setenv(name, value)
    assert from_environment(5.0).exchange("x", 1, 5.0) == [1]
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(GroupError):
        from_environment(0.5)
    # torch pauses beyond its timeout; a thread that is still in there while Python ends takes the process down.
    for thread in threading.enumerate():
        if thread.name == "nvcomm-connect":
            thread.join(LONG_S)


def test_rank_0_that_serves_the_store_names_who_does_not_come(monkeypatch):
    """Without a launcher's store: by hand, or by a scheduler that only sets torchrun's variables."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    first = from_environment(LONG_S)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(first._store.port))
    second = from_environment(LONG_S)
    present = threading.Barrier(2)

    def work(ranks):
        present.wait(LONG_S)
        ranks.barrier("start", 2.0)

    results = together([lambda ranks=ranks: work(ranks) for ranks in (first, second)])
    assert [error.missing for error in results] == [(2,), (2,)]
    assert [ranks._serves for ranks in (first, second)] == [True, False]


class ThreadComm:
    """As much of mpi4py's communicator as the handshake uses, between threads."""

    class Request:
        def __init__(self, ready):
            self._ready = ready

        def Test(self):
            return self._ready()

    def __init__(self, rank, size, shared):
        self._rank, self._size, self._shared = rank, size, shared

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._size

    def Iallgather(self, sent, received):
        self._shared[("gather", self._rank)] = bytes(sent)

        def ready():
            parts = [self._shared.get(("gather", rank)) for rank in range(self._size)]
            if None in parts:
                return False
            received[:] = b"".join(parts)
            return True

        return self.Request(ready)

    def Ibcast(self, buffer, root):
        if self._rank == root:
            self._shared["bcast"] = bytes(buffer)

        def ready():
            if "bcast" not in self._shared:
                return False
            buffer[:] = self._shared["bcast"]
            return True

        return self.Request(ready)


def test_a_program_of_mpiexec_without_a_fitting_mpi4py_is_told_so(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        UnsupportedError, match=r"pip install 'nvcomm\[mpi\]' mpich; or start the program with torchrun"
    ):
        as_group(None)
    alone = ThreadComm(0, 1, {})
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=alone)))
    with pytest.raises(UsageError, match="mpiexec started 4 ranks, and MPI says that this one is alone"):
        as_group(None)
    monkeypatch.setenv("PMI_SIZE", "1")
    assert as_group(None).world_size == 1


def test_mpi_carries_an_address_and_a_store_does_the_rest():
    shared = {}
    groups = together([lambda rank=rank: from_mpi(ThreadComm(rank, 3, shared), LONG_S) for rank in range(3)])
    results = together([lambda ranks=ranks: ranks.exchange("x", ranks.rank, LONG_S) for ranks in groups])
    assert results == [[0, 1, 2]] * 3
    assert [ranks._serves for ranks in groups] == [True, False, False]
    assert json.loads(shared["bcast"])["host"] == "127.0.0.1"  # one host: nothing leaves it


def test_mpi_ranks_that_do_not_come_are_bounded():
    with pytest.raises(GroupError, match="did not end"):
        from_mpi(ThreadComm(0, 2, {}), 0.2)


def test_mpi_rank_0_without_a_store_tells_the_others(monkeypatch):
    def fail(*args, **kwargs):
        raise dist.DistNetworkError("no port")

    monkeypatch.setattr(dist, "TCPStore", fail)
    shared = {}
    results = together([lambda rank=rank: from_mpi(ThreadComm(rank, 2, shared), LONG_S) for rank in range(2)])
    assert all(isinstance(error, GroupError) and "no port" in str(error) for error in results)


def test_own_address_is_one_of_this_host():
    import socket

    with socket.socket() as probe:
        probe.bind((mpi._own_address(), 0))
