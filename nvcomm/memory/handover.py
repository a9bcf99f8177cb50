# SPDX-License-Identifier: Apache-2.0
"""How ranks of one host and one user hand each other a file descriptor, and nobody else.

A descriptor travels over an abstract socket with a random name, which ends with the process. Both sides ask the kernel
who is at the other end (SO_PEERCRED) and talk to their own user alone; the listener also wants a random token that the
group handed out, so that a stray connection of the same user gets nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"=I{_TOKEN_BYTES}s")  # the caller's rank, and the listener's token
_GREETING = b"nvcomm mailbox"
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_CONNECT_PAUSE_S = 1e-3


class HandoverError(Exception):
    """What a rank saw while descriptors were handed over; becomes part of a CapabilityError."""


def listen(world_size: int, descriptors: contextlib.ExitStack) -> tuple[socket.socket, dict[str, Any]]:
    """A listening socket of an abstract name, which ends with the process, and what the group is told of it."""
    listener = descriptors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"nvcomm-{secrets.token_hex(_TOKEN_BYTES)}"
    token = secrets.token_hex(_TOKEN_BYTES)
    listener.bind(f"\0{name}")
    listener.listen(world_size + 16)
    listener.setblocking(False)
    return listener, {"name": name, "token": token}


def hand_over(
    rank: int,
    answers: list[dict[str, Any]],
    listener: socket.socket,
    fd: int,
    deadline: float,
    descriptors: contextlib.ExitStack,
) -> dict[int, int]:
    """Hands `fd` to every other rank; returns theirs, peer -> descriptor, closed with `descriptors`.

    Asks every other rank, serves the others' requests, then reads what came. Requests and answers fit the sockets'
    buffers, so nobody waits for a peer that itself waits for us.

    Raises:
        HandoverError: a peer did not ask or answer in time, or is none of ours.
        OSError: a system call failed.
    """
    peers = [peer for peer in range(len(answers)) if peer != rank]
    asked = {peer: _ask(rank, answers[peer], deadline, descriptors) for peer in peers}
    _serve(listener, bytes.fromhex(answers[rank]["token"]), set(peers), fd, deadline)
    return {peer: _receive(peer, connection, deadline, descriptors) for peer, connection in asked.items()}


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


def _receive(peer: int, connection: socket.socket, deadline: float, descriptors: contextlib.ExitStack) -> int:
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    try:
        greeting, fds, _, _ = socket.recv_fds(connection, 64, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise HandoverError(f"rank {peer} sent no descriptor in time") from None
    for fd in fds:
        descriptors.callback(os.close, fd)
    if greeting != _GREETING or len(fds) != 1:
        raise HandoverError(f"rank {peer} answered {greeting!r} with {len(fds)} descriptors")
    return fds[0]


def _serve(listener: socket.socket, token: bytes, waiting: set[int], fd: int, deadline: float) -> None:
    """Hands `fd` to each rank of `waiting`, once, and to nobody else."""
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise HandoverError(f"rank {', '.join(map(str, sorted(waiting)))} did not ask in time")
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
    except (OSError, HandoverError):
        return None
    if len(hello) != _HELLO.size:
        return None
    rank, shown = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(shown, token) else None


def _check_same_user(connection: socket.socket) -> None:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise HandoverError(f"the other end belongs to user {uid}, this process to user {os.geteuid()}")
