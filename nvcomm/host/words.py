# SPDX-License-Identifier: Apache-2.0
"""Whole-word loads and stores on shared memory, and the barrier between clears and publishes.

docs/mailbox.md R4 asks two things of a store into a mailbox: each aligned 32-bit word arrives whole, and it is written
once. A second store of the same value would land behind the peer's clear, and be read as a word of a later call. That
is what `memcpy` does where its overlapping head and tail meet, and so does numpy's copy (tests/host/test_words.py sees
it happen): payload never goes through one.

Assumption H1, named and not proven: numpy's inner loop of a bitwise ufunc over aligned, contiguous uint32
arrays writes every element of the result exactly once, in pieces of whole elements. It holds for scalar code and for
vector code, whose aligned or unaligned vectors are made of whole aligned words; x86-64 does not tear an aligned word
inside a vector store. The operand 0 is a run-time value, so no compiler can turn the loop into `memcpy`.
Reading needs less: a word is read again until it is whole and not EMPTY, and stays as it is from then on.
"""

from __future__ import annotations

import platform
import threading

import numpy as np
import numpy.typing as npt

from nvcomm.errors import UnsupportedError
from nvcomm.mailbox import EMPTY, ESCAPE

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

EMPTY_WORD = np.uint32(EMPTY)
ESCAPE_WORD = np.uint32(ESCAPE)
_ZERO = np.uint32(0)


def require_x86_64() -> None:
    """Raises UnsupportedError where the order of stores is not the one that the host world is built on."""
    machine = platform.machine()
    if machine not in {"x86_64", "AMD64"}:
        raise UnsupportedError(
            f"the host world runs on x86-64 alone, whose processors keep stores in order; this machine is {machine}. "
            f"Use a GPU world, or another machine."
        )


def store_words(target: Words, words: Words) -> None:
    """Publishes `words` into a mailbox: every word whole, and once (R4)."""
    np.bitwise_or(words, _ZERO, out=target)


def clear_words(target: Words) -> None:
    """Stores EMPTY over collected words. Nobody else reads or writes them before this rank publishes again (R1)."""
    target.fill(EMPTY_WORD)


def first_empty(words: Words) -> int:
    """Index of the first word that has not arrived, or -1. Compares bits as integers (R4)."""
    empty = np.equal(words, EMPTY_WORD)
    return int(empty.argmax()) if np.count_nonzero(empty) else -1


def full_barrier() -> None:
    """Everything this thread stored before is visible to all before anything it stores or loads later (R1).

    A CPython lock is taken with a locked compare-and-swap (the futex semaphore up to 3.12, PyMutex from 3.13), and
    releasing it is another locked instruction. On x86-64 a locked instruction drains the store buffer and the
    write-combining buffers, and no load or store passes it in either direction (Intel SDM 3A, 8.2.2 and 11.10). Plain
    stores would stay in order without it; the fast-string and streaming stores that a C library may use would not.
    The lock is new each time: nobody contends for it, and a forked child cannot find it taken.
    """
    with threading.Lock():
        pass
