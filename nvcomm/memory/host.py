# SPDX-License-Identifier: Apache-2.0
"""Mailboxes of CPU ranks: sealed shared memory each, handed to the other ranks over AF_UNIX.

Nothing of it has a name in a file system, so nothing can be guessed, left behind or found by another user, also after
SIGKILL (`nvcomm.memory.sealed`, `nvcomm.memory.handover`).

A rank fills its mailbox before it hands it out, so no peer can store into it too early. Every wait ends at one
deadline, and what fails on one rank is told to all: each raises the same CapabilityError.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nvcomm.errors import CapabilityError, UnsupportedError
from nvcomm.group import Group
from nvcomm.memory import handover, sealed

Words = npt.NDArray[np.uint32]


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
    if not sealed.supported():
        raise UnsupportedError("the host world needs Linux's memfd_create and file seals; this platform has none.")
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        maps: dict[int, mmap.mmap] = {}
        undo.callback(_unmap, maps)
        with contextlib.ExitStack() as descriptors:
            failure: str | None = None
            answer: dict[str, Any] = {}
            try:
                fd = sealed.sealed_memfd(size_bytes, descriptors)
                maps[group.rank] = sealed.mapped(fd, size_bytes)
                sealed.arm(maps[group.rank], armed_bytes, armed_word)
                listener, answer = handover.listen(group.world_size, descriptors)
            except OSError as error:
                failure = f"cannot create shared memory: {error}"
            answers = _agree_or_raise(group, "memory/host/listen", {**answer, "error": failure}, deadline)
            try:
                # Leaves time for the second exchange: a rank that fails here still has to be heard.
                received = handover.hand_over(group.rank, answers, listener, fd, _share_of(deadline), descriptors)
                _map_peers(maps, received, size_bytes)
            except (OSError, handover.HandoverError) as error:
                failure = f"cannot exchange shared memory: {error or type(error).__name__}"
        _agree_or_raise(group, "memory/host/mapped", {"error": failure}, deadline)
        memory = HostMemory(group.rank, [maps[rank] for rank in range(group.world_size)])
        undo.pop_all()
        return memory


def local_memories(world_size: int, size_bytes: int, *, armed_bytes: int, armed_word: int) -> list[HostMemory]:
    """The same for ranks that are threads of this process; element r is for rank r, and all share the mappings."""
    maps = [mmap.mmap(-1, size_bytes) for _ in range(world_size)]
    for mapping in maps:
        sealed.arm(mapping, armed_bytes, armed_word)
    # Each mapping ends with the last view of it: no rank may unmap what the others still use.
    return [HostMemory(rank, maps, owns_maps=False) for rank in range(world_size)]


def _map_peers(maps: dict[int, mmap.mmap], received: dict[int, int], size_bytes: int) -> None:
    for peer, fd in received.items():
        if why_not := sealed.doubt(fd, size_bytes):
            raise handover.HandoverError(f"rank {peer} sent {why_not}")
        maps[peer] = sealed.mapped(fd, size_bytes)


def _unmap(maps: dict[int, mmap.mmap]) -> None:
    for mapping in maps.values():
        mapping.close()


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
