# SPDX-License-Identifier: Apache-2.0
"""Collecting a chunk from each of several rows that do not lie in step, or not from all of them."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm import device
from nvcomm.device import POLLS_PER_CLOCK, Mailbox
from nvcomm.mailbox import CHUNK_WORDS, EMPTY
from nvcomm.ptx import memory as ptx

# How much longer a rank waits for an owner's sum: far more than lies between the starts of two waits of one call.
SUM_GRACE_NS = 250_000_000


def waiting_for_sums(box: Mailbox) -> Mailbox:
    """The mailbox, with a little more patience: an owner who waits for somebody has to say so first (R10)."""
    timeout_ns = box.handle.timeout_ns
    longer = timeout_ns + cutlass.min(timeout_ns // 4, Int64(SUM_GRACE_NS))
    return replace(box, handle=box.handle._replace(timeout_ns=longer))


def owner_of(rank: Int32, k: int, world_size: int) -> Int32:
    """The k-th rank after `rank`, the order in which a rank knows its peers."""
    after = rank + k
    return after - world_size * Int32(after >= world_size)


def _load(
    words: cute.Tensor, addrs: tuple[Int64, ...], wanted: tuple[Boolean, ...], otherwise: tuple[Uint32, ...]
) -> None:
    """One chunk of each row, all loads in flight together."""
    for r, (addr, there) in enumerate(zip(addrs, wanted, strict=True)):
        for i, word in enumerate(ptx.ld_relaxed_sys_v4_if(addr, there, otherwise)):
            words[r * CHUNK_WORDS + i] = word


def _reload(words: cute.Tensor, addrs: tuple[Int64, ...]) -> None:
    """Loads again the rows that are not complete: polls take bandwidth from the stores they wait for."""
    for r, addr in enumerate(addrs):
        held = tuple(words[r * CHUNK_WORDS + i] for i in range(CHUNK_WORDS))
        missing = held[0] == Uint32(EMPTY)
        for word in held[1:]:
            missing = missing | (word == Uint32(EMPTY))
        for i, word in enumerate(ptx.ld_relaxed_sys_v4_if(addr, Boolean(missing), held)):
            words[r * CHUNK_WORDS + i] = word


@cute.jit
def collect_rows(
    box: Mailbox,
    words: cute.Tensor,
    addrs: tuple[Int64, ...],
    wanted: tuple[Boolean, ...],
    otherwise: tuple[Uint32, ...],
    chunk: Int32,
    chunk_stride: cutlass.Constexpr,
    wait: cute.Tensor,
    spin: cutlass.Constexpr,
) -> None:
    """Reads the chunk at `addrs[r]` of each row r that is `wanted` until no word is EMPTY (R2, R4).

    On timeout (R10) the rows that are not complete are filled with 0xFF bytes.

    Args:
        box: the mailboxes.
        words: registers for a chunk of each row, in rank order.
        addrs: address of the chunk in each row.
        wanted: which rows to read.
        otherwise: what the others are to hold; no word of it is EMPTY.
        chunk: index of row 0's chunk, for the report.
        chunk_stride: chunks by which each further row's lies behind it.
        wait: see `device.collect_chunk`.
        spin: False reads once, whatever is there: the copy that benchmarks compare with.
    """
    _load(words, addrs, wanted, otherwise)
    if const_expr(spin):
        poll_rows(box, words, addrs, chunk, chunk_stride, 0, wait)


@cute.jit
def poll_rows(
    box: Mailbox,
    words: cute.Tensor,
    addrs: tuple[Int64, ...],
    chunk: Int32,
    chunk_stride: cutlass.Constexpr,
    first_rank: Int32 | int,
    wait: cute.Tensor,
) -> None:
    """Reads again what is EMPTY of the words of `collect_rows`, until nothing is; `first_rank` writes the first row."""
    num_rows = len(addrs)
    missing = device.any_equals(words, EMPTY, num_rows * CHUNK_WORDS)
    polls = Int32(0)
    while missing & (wait[0] >= 0):
        _reload(words, addrs)
        missing = device.any_equals(words, EMPTY, num_rows * CHUNK_WORDS)
        polls += 1
        if polls == POLLS_PER_CLOCK:
            polls = Int32(0)
            if missing:
                look_at_clock(box, words, num_rows, chunk, chunk_stride, first_rank, wait)
    if missing:
        device.fill_missing(words, num_rows)


@cute.jit
def look_at_clock(
    box: Mailbox,
    words: cute.Tensor,
    num_rows: cutlass.Constexpr,
    chunk: Int32,
    chunk_stride: cutlass.Constexpr,
    first_rank: Int32 | int,
    wait: cute.Tensor,
) -> None:
    """As `device.look_at_clock`, told which row is missing: its chunk is `chunk_stride` behind the row's before it."""
    row = Int32(0)
    for r in range_constexpr(num_rows - 1, -1, -1):
        for i in range_constexpr(CHUNK_WORDS):
            if words[r * CHUNK_WORDS + i] == Uint32(EMPTY):
                row = Int32(r)
    alone = cute.make_rmem_tensor(CHUNK_WORDS, Uint32)
    alone.fill(Uint32(0))
    for r in range_constexpr(num_rows):
        if row == r:
            for i in range_constexpr(CHUNK_WORDS):
                alone[i] = words[r * CHUNK_WORDS + i]
    device.look_at_clock(box, alone, chunk + row * chunk_stride, first_rank + row, 1, wait)
