# SPDX-License-Identifier: Apache-2.0
"""Shared memory between CPU ranks: who gets it, what is left of it, and every system call made to fail once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import mmap
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from nvcomm.errors import CapabilityError, GroupError, UnsupportedError
from nvcomm.group import local_groups
from nvcomm.memory import Memory, handover, host, sealed
from nvcomm.memory.host import connect, local_memories
from tests.threads import together

SIZE = 4096
ARMED = 4000
WORD = 0xFFFAFFFA
LONG_S = 40.0  # that nobody waits for, however busy the machine


def build(group, timeout_s=LONG_S, size_bytes=SIZE):
    return connect(group, size_bytes, armed_bytes=ARMED, armed_word=WORD, timeout_s=timeout_s)


def on_ranks(world_size, work):
    """`work(group)` on a thread for each rank; its results, or what was raised."""
    return together([functools.partial(work, group) for group in local_groups(world_size)], 2 * LONG_S)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:nvcomm")


@pytest.fixture(autouse=True)
def _nothing_leaks():
    gc.collect()  # what earlier tests of this process left to it
    before = open_descriptors()
    assert mappings() == 0
    yield
    if open_descriptors() > before or mappings():
        gc.collect()  # a traceback may hold a frame
    assert open_descriptors() <= before
    assert mappings() == 0


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_sees_every_mailbox(world_size):
    memories = on_ranks(world_size, build)
    for rank, memory in enumerate(memories):
        assert isinstance(memory, Memory)
        assert (memory.world, memory.rank, memory.world_size) == ("host", rank, world_size)
        assert (memory.size_bytes, memory.multicast_ptr) == (SIZE, 0)
        assert len(set(memory.peer_ptrs)) == world_size
        for peer, words in enumerate(memory.words):
            assert words.ctypes.data == memory.peer_ptrs[peer]
            assert (words[: ARMED // 4] == WORD).all()
            assert (words[ARMED // 4 :] == 0).all()
    for rank, memory in enumerate(memories):
        for peer in range(world_size):
            memory.words[peer][rank] = 100 * rank + peer
    for peer, memory in enumerate(memories):
        assert memory.words[peer][:world_size].tolist() == [100 * rank + peer for rank in range(world_size)]
    with contextlib.ExitStack() as stack:
        for memory in memories:
            stack.enter_context(memory)
    memories[0].close()


def test_threads_share_the_mappings():
    memories = local_memories(3, SIZE, armed_bytes=ARMED, armed_word=WORD)
    assert all(isinstance(memory, Memory) for memory in memories)
    assert len({memory.peer_ptrs for memory in memories}) == 1
    assert (memories[1].words[2][: ARMED // 4] == WORD).all()
    memories[0].close()
    memories[1].words[0][5] = 7  # the others' mappings live on
    assert memories[2].words[0][5] == 7
    for memory in memories:
        memory.close()


def test_a_view_outlives_close_and_then_the_mapping_goes():
    memory = on_ranks(1, build)[0]
    view = memory.words[0]
    memory.close()
    assert view[0] == WORD
    assert mappings() == 1
    del view


@pytest.mark.parametrize("broken_rank", [0, 2])
@pytest.mark.parametrize(
    "call", ["memfd_create", "ftruncate", "posix_fallocate", "add_seals", "get_seals", "mmap", "bind", "listen",
             "connect", "send", "accept", "send_fds", "recv_fds", "getsockopt", "fstat", "no_descriptor"],
)  # fmt: skip
def test_each_call_that_fails_once_fails_all_ranks_alike_and_leaks_nothing(monkeypatch, call, broken_rank):
    """The ranks are threads, and only one thread's call fails."""
    main = threading.local()
    failed = []

    def guard(original, result=None):
        def wrapped(*args, **kwargs):
            if getattr(main, "broken", False) and not failed:
                failed.append(call)
                if result is not None:
                    return result(*args, **kwargs)
                raise OSError(errno.EIO, f"injected into {call}")
            return original(*args, **kwargs)

        return wrapped

    class Fcntl:
        def __getattr__(self, name):
            return getattr(fcntl, name)

        def fcntl(self, fd, command, argument=0):
            wanted = {"add_seals": fcntl.F_ADD_SEALS, "get_seals": fcntl.F_GET_SEALS}.get(call)
            act = guard(fcntl.fcntl) if command == wanted else fcntl.fcntl
            return act(fd, command, argument)

    class Socket(socket.socket):
        def accept(self):
            fd, address = self._accept()
            return Socket(self.family, self.type, self.proto, fileno=fd), address

    if call in {"memfd_create", "ftruncate", "posix_fallocate", "fstat"}:
        monkeypatch.setattr(os, call, guard(getattr(os, call)))
    elif call in {"add_seals", "get_seals"}:
        monkeypatch.setattr(sealed, "fcntl", Fcntl())
    elif call == "mmap":
        monkeypatch.setattr(mmap, "mmap", guard(mmap.mmap))
    elif call in {"send_fds", "recv_fds"}:
        monkeypatch.setattr(socket, call, guard(getattr(socket, call)))
    elif call == "no_descriptor":
        monkeypatch.setattr(socket, "recv_fds", guard(socket.recv_fds, lambda *_: (b"nvcomm mailbox", [], 0, None)))
    else:
        original = getattr(Socket, call)
        setattr(Socket, call, lambda self, *args: guard(original)(self, *args))
        monkeypatch.setattr(socket, "socket", Socket)

    def work(group):
        main.broken = group.rank == broken_rank
        return build(group)

    # Where a rank waits for one that failed: long enough for a busy machine to come to the call that fails.
    monkeypatch.setattr(host, "_share_of", lambda deadline: time.monotonic() + 3.0)
    started = time.monotonic()
    results = on_ranks(3, work)
    assert time.monotonic() - started < LONG_S
    assert failed == [call]
    assert [type(result) for result in results] == [CapabilityError] * 3, results
    assert len({str(result) for result in results}) == 1
    assert broken_rank in results[0].reasons


def test_a_rank_that_never_comes_is_named():
    both = threading.Barrier(2)

    def work(group):
        if group.rank:
            both.wait(LONG_S)
            build(group, 2.0)

    started = time.monotonic()
    results = on_ranks(3, work)
    assert time.monotonic() - started < LONG_S
    assert [error.missing for error in results[1:]] == [(0,), (0,)]


def test_a_rank_that_stops_after_it_was_heard_does_not_hold_the_others(monkeypatch):
    original = handover.hand_over

    def hand_over(rank, *args):
        if rank == 1:
            raise SystemExit  # ends this thread; nobody hears of it
        return original(rank, *args)

    monkeypatch.setattr(handover, "hand_over", hand_over)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def work(group):
        try:
            return build(group, 4.0)
        except SystemExit:
            return None

    started = time.monotonic()
    results = on_ranks(3, work)
    assert time.monotonic() - started < LONG_S
    assert all(isinstance(results[rank], GroupError) and results[rank].missing == (1,) for rank in (0, 2))


def test_memory_that_can_shrink_or_has_another_size_is_refused(monkeypatch):
    def unsealed(size_bytes, descriptors):
        fd = os.memfd_create("nvcomm", os.MFD_CLOEXEC)
        descriptors.callback(os.close, fd)
        os.ftruncate(fd, size_bytes)
        return fd

    monkeypatch.setattr(sealed, "sealed_memfd", unsealed)
    assert all("seals" in str(error) for error in on_ranks(2, build))
    monkeypatch.undo()
    results = on_ranks(2, lambda group: build(group, LONG_S, SIZE << group.rank))
    assert all(f"sent {SIZE << 1} bytes" in str(error) for error in results)


def test_the_memory_is_sealed():
    with contextlib.ExitStack() as descriptors:
        fd = sealed.sealed_memfd(SIZE, descriptors)
        for size in (0, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)


class TestStrangers:
    """Connections that are none of ours get nothing and hold nobody."""

    def serve(self, visit, limit_s=LONG_S):
        with contextlib.ExitStack() as descriptors:
            fd = sealed.sealed_memfd(SIZE, descriptors)
            listener, answer = handover.listen(2, descriptors)
            result = []

            def work():
                try:
                    handover._serve(listener, bytes.fromhex(answer["token"]), {1}, fd, time.monotonic() + limit_s)
                except handover.HandoverError as error:
                    result.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            try:
                visit(answer)
            finally:
                thread.join(2 * LONG_S)
            return result

    def visitor(self, answer):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{answer['name']}")
        connection.settimeout(LONG_S)
        return connection

    def refused(self, connection):
        try:
            return socket.recv_fds(connection, 64, 1)[:2] == (b"", [])
        except ConnectionResetError:  # hung up without having read what we sent
            return True

    def hello(self, rank, token):
        return struct.pack("=I32s", rank, token)

    def test_only_the_right_token_of_a_rank_that_is_waited_for_is_served(self):
        def visit(answer):
            token = bytes.fromhex(answer["token"])
            with self.visitor(answer) as silent:
                wrong = [
                    self.hello(1, bytes(32)), self.hello(5, token), b"", b"x", self.hello(1, token) + b"x",
                ]  # fmt: skip
                for text in wrong:
                    with self.visitor(answer) as stranger:
                        stranger.send(text)
                        assert self.refused(stranger)
                with self.visitor(answer) as peer:
                    peer.send(self.hello(1, token))
                    greeting, fds, _, _ = socket.recv_fds(peer, 64, 1)
                    assert greeting == b"nvcomm mailbox"
                    assert os.fstat(fds[0]).st_size == SIZE
                    os.close(fds[0])
                silent.close()

        assert self.serve(visit) == []

    def test_another_user_is_refused_whatever_it_knows(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

        def visit(answer):
            with self.visitor(answer) as stranger:
                stranger.send(self.hello(1, bytes.fromhex(answer["token"])))
                assert self.refused(stranger)

        assert "rank 1 did not ask in time" in str(self.serve(visit, 5.0)[0])

    def test_a_listener_of_another_user_is_told_no_token(self, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        results = on_ranks(2, build)
        assert all(isinstance(error, CapabilityError) and "belongs to user" in str(error) for error in results)


def test_platforms_without_memfd_are_refused(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedError, match="memfd_create"):
        build(local_groups(1)[0])


def test_arming_happens_before_anybody_else_has_the_memory(monkeypatch):
    seen = []
    original = handover.hand_over

    def hand_over(rank, answers, listener, fd, *args):
        seen.append(int.from_bytes(os.pread(fd, 4, 0), "little"))
        return original(rank, answers, listener, fd, *args)

    monkeypatch.setattr(handover, "hand_over", hand_over)
    for memory in on_ranks(2, build):
        memory.close()
    assert seen == [WORD, WORD]
