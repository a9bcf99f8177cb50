# SPDX-License-Identifier: Apache-2.0
"""Anonymous shared memory that nobody can cut off: a memfd, sealed before anybody else has it.

A peer that could truncate a mailbox would kill this process with SIGBUS at its next load, so the memory is sealed
against shrinking and growing, and a descriptor that comes from a peer is looked at before it is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np


def supported() -> bool:
    """Whether the platform has what this needs."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def sealed_memfd(size_bytes: int, descriptors: contextlib.ExitStack) -> int:
    """A new descriptor of `size_bytes`, closed with `descriptors`."""
    fd = os.memfd_create("nvcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptors.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    os.posix_fallocate(fd, 0, size_bytes)  # a limit that is too low is an error now, not SIGBUS in a gather
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def mapped(fd: int, size_bytes: int) -> mmap.mmap:
    """The memory behind `fd`."""
    return mmap.mmap(fd, size_bytes)


def arm(mapping: mmap.mmap, armed_bytes: int, armed_word: int) -> None:
    """Fills the first bytes with a word."""
    np.frombuffer(mapping, np.uint32, count=armed_bytes // 4).fill(armed_word)


def doubt(fd: int, size_bytes: int) -> str | None:
    """Why the descriptor of a peer is not taken, or None."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    seen_bytes = os.fstat(fd).st_size
    if seen_bytes != size_bytes or seals & wanted != wanted:
        return f"{seen_bytes} bytes with seals {seals:#x}; wanted {size_bytes} bytes, seals {wanted:#x}"
    return None
