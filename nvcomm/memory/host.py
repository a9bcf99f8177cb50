# SPDX-License-Identifier: Apache-2.0
"""Mailboxes of CPU ranks: a sealed memfd each, handed to the other ranks over AF_UNIX.

Nothing of it has a name in a file system, so nothing can be guessed, left behind or found by another user, also after
SIGKILL:

- the memory is a memfd, sealed against shrinking and growing before anybody else has it: a peer that could truncate it
  would kill this process with SIGBUS at its next load;
- it travels as a file descriptor over an abstract socket with a random name, which ends with the process. Both sides
  ask the kernel who is at the other end (SO_PEERCRED) and talk to their own user alone; the listener also wants a
  random token that the group handed out, so that a stray connection of the same user gets nothing.

A rank fills its mailbox before it hands it out, so no peer can store into it too early. Every wait ends at one
deadline, and what fails on one rank is told to all: each raises the same CapabilityError.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nvcomm.errors import CapabilityError, UnsupportedError
from nvcomm.group import Group

Words = npt.NDArray[np.uint32]

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"=I{_TOKEN_BYTES}s")  # the caller's rank, and the listener's token
_GREETING = b"nvcomm mailbox"
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_CONNECT_PAUSE_S = 1e-3


class HostMemory:
    """Every rank's mailbox in shared memory, as one rank sees it; see `nvcomm.memory.Memory`.

    Attributes:
        words: each rank's mailbox as uint32, indexed by rank. Views of them keep the mapping alive after `close()`.
    """

    world = "host"
    multicast_ptr = 0

    def __init__(self, rank: int, maps: list[mmap.mmap], *, owns_maps: bool = True) -> None:
        self.rank = rank
        self.world_size = len(maps)
        self.size_bytes = len(maps[rank])
        self.words: tuple[Words, ...] = tuple(np.frombuffer(mapping, np.uint32) for mapping in maps)
        self.peer_ptrs = tuple(int(words.ctypes.data) for words in self.words)
        self._maps = maps if owns_maps else []

    def close(self) -> None:
        """Unmaps every mailbox; where a view is still in use, its mapping ends with the view."""
        self.words = ()
        maps, self._maps = self._maps, []
        for mapping in maps:
            with contextlib.suppress(BufferError):  # a view is alive: the mapping goes when it does
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def connect(group: Group, size_bytes: int, *, armed_bytes: int, armed_word: int, timeout_s: float) -> HostMemory:
    """Builds this rank's mailbox and maps every other rank's. Collective.

    Args:
        group: the ranks, processes or threads of one host and one user.
        size_bytes: bytes of a mailbox, a multiple of 4.
        armed_bytes: the first bytes, filled with `armed_word` before anybody else has the memory; the rest is 0.
        armed_word: 32 bits.
        timeout_s: bound of the whole call, give or take a second.

    Raises:
        UnsupportedError: the platform has no sealed memfd.
        CapabilityError: a system call failed on some rank, or a rank was not reached; the same text on every rank.
        GroupError: a rank did not answer.
    """
    if not (hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")):
        raise UnsupportedError("the host world needs Linux's memfd_create and file seals; this platform has none.")
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        maps: dict[int, mmap.mmap] = {}
        undo.callback(_unmap, maps)
        with contextlib.ExitStack() as descriptors:
            failure: str | None = None
            answer: dict[str, Any] = {}
            try:
                fd = _sealed_memfd(size_bytes, descriptors)
                maps[group.rank] = _armed(fd, size_bytes, armed_bytes, armed_word)
                listener, answer = _listen(group.world_size, descriptors)
            except OSError as error:
                failure = f"cannot create shared memory: {error}"
            answers = _agree_or_raise(group, "memory/host/listen", {**answer, "error": failure}, deadline)
            try:
                # Leaves time for the second exchange: a rank that fails here still has to be heard.
                _hand_over(group.rank, answers, listener, fd, size_bytes, maps, _share_of(deadline), descriptors)
            except (OSError, _HandoverError) as error:
                failure = f"cannot exchange shared memory: {error or type(error).__name__}"
        _agree_or_raise(group, "memory/host/mapped", {"error": failure}, deadline)
        memory = HostMemory(group.rank, [maps[rank] for rank in range(group.world_size)])
        undo.pop_all()
        return memory


def local_memories(world_size: int, size_bytes: int, *, armed_bytes: int, armed_word: int) -> list[HostMemory]:
    """The same for ranks that are threads of this process; element r is for rank r, and all share the mappings."""
    maps = [mmap.mmap(-1, size_bytes) for _ in range(world_size)]
    for mapping in maps:
        _arm(mapping, armed_bytes, armed_word)
    # Each mapping ends with the last view of it: no rank may unmap what the others still use.
    return [HostMemory(rank, maps, owns_maps=False) for rank in range(world_size)]


def _unmap(maps: dict[int, mmap.mmap]) -> None:
    for mapping in maps.values():
        mapping.close()


class _HandoverError(Exception):
    """What a rank saw while descriptors were handed over; becomes part of a CapabilityError."""


def _sealed_memfd(size_bytes: int, descriptors: contextlib.ExitStack) -> int:
    fd = os.memfd_create("nvcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptors.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    os.posix_fallocate(fd, 0, size_bytes)  # too little memory is an error now, not SIGBUS in a gather
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _armed(fd: int, size_bytes: int, armed_bytes: int, armed_word: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes)
    _arm(mapping, armed_bytes, armed_word)
    return mapping


def _arm(mapping: mmap.mmap, armed_bytes: int, armed_word: int) -> None:
    np.frombuffer(mapping, np.uint32, count=armed_bytes // 4).fill(armed_word)


def _listen(world_size: int, descriptors: contextlib.ExitStack) -> tuple[socket.socket, dict[str, Any]]:
    """A listening socket of an abstract name, which ends with the process, and what the group is told of it."""
    listener = descriptors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"nvcomm-{secrets.token_hex(_TOKEN_BYTES)}"
    token = secrets.token_hex(_TOKEN_BYTES)
    listener.bind(f"\0{name}")
    listener.listen(world_size + 16)
    listener.setblocking(False)
    return listener, {"name": name, "token": token}


def _agree_or_raise(group: Group, tag: str, answer: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Every rank's answer, or the same CapabilityError everywhere if one of them tells of a failure."""
    left = max(deadline - time.monotonic(), 1.0)
    answers = [value if isinstance(value, dict) else {} for value in group.exchange(tag, answer, left)]
    reasons = {rank: [str(value["error"])] for rank, value in enumerate(answers) if value.get("error")}
    if reasons:
        listed = "; ".join(f"rank {rank} {texts[0]}" for rank, texts in reasons.items())
        raise CapabilityError(
            f"the host world's shared memory could not be set up: {listed}. All ranks have to run on one host, in one "
            f"network namespace, as one user, with memory and file descriptors to spare.",
            reasons,
        )
    return answers


def _share_of(deadline: float) -> float:
    now = time.monotonic()
    return now + 0.75 * max(deadline - now, 0.0)


def _hand_over(
    rank: int,
    answers: list[dict[str, Any]],
    listener: socket.socket,
    fd: int,
    size_bytes: int,
    maps: dict[int, mmap.mmap],
    deadline: float,
    descriptors: contextlib.ExitStack,
) -> None:
    """Asks every other rank for its descriptor, serves the others' requests, then maps what came.

    Requests and answers fit the sockets' buffers, so nobody waits for a peer that itself waits for us.
    """
    peers = [peer for peer in range(len(answers)) if peer != rank]
    asked = {peer: _ask(rank, answers[peer], deadline, descriptors) for peer in peers}
    _serve(listener, bytes.fromhex(answers[rank]["token"]), set(peers), fd, deadline)
    for peer, connection in asked.items():
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            greeting, fds, _, _ = socket.recv_fds(connection, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise _HandoverError(f"rank {peer} sent no descriptor in time") from None
        with contextlib.ExitStack() as received:
            for peer_fd in fds:
                received.callback(os.close, peer_fd)
            if greeting != _GREETING or len(fds) != 1:
                raise _HandoverError(f"rank {peer} answered {greeting!r} with {len(fds)} descriptors")
            _check_descriptor(fds[0], size_bytes, peer)
            maps[peer] = mmap.mmap(fds[0], size_bytes)


def _ask(rank: int, answer: dict[str, Any], deadline: float, descriptors: contextlib.ExitStack) -> socket.socket:
    connection = descriptors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.setblocking(False)
    while True:
        try:
            connection.connect(f"\0{answer['name']}")
            break
        except BlockingIOError:  # the listener's queue is full
            if time.monotonic() >= deadline:
                raise
            time.sleep(_CONNECT_PAUSE_S)
    _check_same_user(connection)
    connection.send(_HELLO.pack(rank, bytes.fromhex(answer["token"])))
    return connection


def _serve(listener: socket.socket, token: bytes, waiting: set[int], fd: int, deadline: float) -> None:
    """Hands `fd` to each rank of `waiting`, once, and to nobody else."""
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _HandoverError(f"rank {', '.join(map(str, sorted(waiting)))} did not ask in time")
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with contextlib.suppress(BlockingIOError, ConnectionError):  # it hung up again
                        connection, _ = listener.accept()
                        connections.enter_context(connection)
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                selector.unregister(connection)
                caller = _caller(connection, token)
                if caller in waiting:
                    socket.send_fds(connection, [_GREETING], [fd])
                    waiting.discard(caller)
                connection.close()


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """The rank at the other end, or None for whoever is none of ours."""
    try:
        _check_same_user(connection)
        hello = connection.recv(_HELLO.size + 1)
    except (OSError, _HandoverError):
        return None
    if len(hello) != _HELLO.size:
        return None
    rank, shown = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(shown, token) else None


def _check_same_user(connection: socket.socket) -> None:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise _HandoverError(f"the other end belongs to user {uid}, this process to user {os.geteuid()}")


def _check_descriptor(fd: int, size_bytes: int, peer: int) -> None:
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    seen_bytes = os.fstat(fd).st_size
    if seen_bytes != size_bytes or seals & wanted != wanted:
        raise _HandoverError(
            f"rank {peer} sent {seen_bytes} bytes with seals {seals:#x}; wanted {size_bytes} bytes, seals {wanted:#x}"
        )
