# SPDX-License-Identifier: Apache-2.0
"""Collect: reads until no word is EMPTY (R2, R4), and clears what was read (R3)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm.device.view import Mailbox
from nvcomm.device.wait import POLLS_PER_CLOCK, look_at_clock
from nvcomm.mailbox import CHUNK_WORDS, EMPTY
from nvcomm.ptx import memory as ptx


def load_rows(words: cute.Tensor, addr: Int64, row_bytes: int, num_rows: int) -> None:
    """Loads one chunk of each row, all loads in flight together: one after the other costs an L2 round trip each."""
    for r in range(num_rows):
        chunk = ptx.ld_relaxed_sys_v4(addr + r * row_bytes)
        for i in range(CHUNK_WORDS):
            words[r * CHUNK_WORDS + i] = chunk[i]


@cute.jit
def reload_rows(words: cute.Tensor, addr: Int64, row_bytes: int, num_rows: cutlass.Constexpr) -> None:
    """Loads again the rows that are not complete yet: polls take bandwidth from the stores they wait for."""
    for r in range_constexpr(num_rows):
        missing = words[r * CHUNK_WORDS] == Uint32(EMPTY)
        for i in range_constexpr(1, CHUNK_WORDS):
            missing = missing | (words[r * CHUNK_WORDS + i] == Uint32(EMPTY))
        if missing:
            chunk = ptx.ld_relaxed_sys_v4(addr + r * row_bytes)
            for i in range_constexpr(CHUNK_WORDS):
                words[r * CHUNK_WORDS + i] = chunk[i]


def any_equals(words: cute.Tensor, value: int, count: int) -> Boolean:
    """Whether one of the first `count` words equals `value`. `|`, not `or`: a chain of `or` compiles for minutes."""
    found = words[0] == Uint32(value)
    for i in range(1, count):
        found = found | (words[i] == Uint32(value))
    return Boolean(found)


@cute.jit
def collect_chunk(
    box: Mailbox,
    words: cute.Tensor,
    addr: Int64,
    chunk: Int32,
    src_rank: int,
    num_rows: cutlass.Constexpr,
    wait: cute.Tensor,
) -> None:
    """Reads chunk `chunk` of rows `src_rank` to `src_rank + num_rows - 1` at `addr` until no word is EMPTY (R2, R4).

    On timeout (R10) the rows that are not complete are filled with 0xFF bytes.

    Args:
        box: the mailboxes.
        words: registers for `num_rows` chunks.
        addr: address of the chunk in the first of the rows.
        chunk: its index, for the report.
        src_rank: the first row's rank.
        num_rows: rows read.
        wait: one Int64: when this thread's first long wait of the call began, in ns; 0 before it, -1 once it gave up.
    """
    load_rows(words, addr, box.layout.row_bytes, num_rows)
    missing = any_equals(words, EMPTY, num_rows * CHUNK_WORDS)
    polls = Int32(0)
    while missing & (wait[0] >= 0):
        reload_rows(words, addr, box.layout.row_bytes, num_rows)
        missing = any_equals(words, EMPTY, num_rows * CHUNK_WORDS)
        polls += 1
        if polls == POLLS_PER_CLOCK:
            polls = Int32(0)
            if missing:
                look_at_clock(box, words, chunk, src_rank, num_rows, wait)
    if missing:
        fill_missing(words, num_rows)


def fill_missing(words: cute.Tensor, num_rows: int) -> None:
    """After a timeout (R10): 0xFF bytes in the rows of which a word is EMPTY."""
    for r in range(num_rows):
        lost = Boolean(False)
        for i in range(CHUNK_WORDS):
            lost = lost | (words[r * CHUNK_WORDS + i] == Uint32(EMPTY))
        for i in range(CHUNK_WORDS):
            words[r * CHUNK_WORDS + i] = words[r * CHUNK_WORDS + i] | (Uint32(0) - Uint32(lost))


@cute.jit
def collect_word(box: Mailbox, addr: Int64, chunk: Int32, src_rank: int, wait: cute.Tensor) -> Uint32:
    """Reads one word until it is not EMPTY; EMPTY after a timeout."""
    word = ptx.ld_relaxed_sys(addr)
    polls = Int32(0)
    seen = cute.make_rmem_tensor(CHUNK_WORDS, Uint32)
    while (word == Uint32(EMPTY)) & (wait[0] >= 0):
        word = ptx.ld_relaxed_sys(addr)
        polls += 1
        if (polls == POLLS_PER_CLOCK) & (word == Uint32(EMPTY)):
            polls = Int32(0)
            seen.fill(Uint32(EMPTY))
            look_at_clock(box, seen, chunk, src_rank, 1, wait)
    return word


def clear_chunk(box: Mailbox, addr: Int64, num_rows: int) -> None:
    """Stores EMPTY over what this thread collected at `addr` in each row, and over nothing else (R3)."""
    for r in range(num_rows):
        ptx.st_relaxed_sys_v4(addr + r * box.layout.row_bytes, (Uint32(EMPTY),) * CHUNK_WORDS)
