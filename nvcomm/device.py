# SPDX-License-Identifier: Apache-2.0
"""Publish, collect and clear, for every kernel that touches a mailbox.

The functions are inlined into kernels written in CuTe DSL. Rules R1 to R13 are those of docs/mailbox.md; this file
keeps R2 to R5 and R10, the kernel that calls it keeps R1, R6 and R8.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import mailbox
from nvcomm.handle import Handle
from nvcomm.mailbox import CHUNK_WORDS, EMPTY, ESCAPE, MailboxLayout
from nvcomm.outbox import post
from nvcomm.ptx import memory as ptx

WARP = 32
FILL = 0xFFFFFFFF  # what a caller finds where nothing arrived: -1 as an index, NaN as a float (R10)
# Failed polls between two looks at the clock. A poll is an L2 round trip, so this is some 0.1 ms: waits below it
# cost nothing, and are not in `stats()` either.
POLLS_PER_CLOCK = 256
FAULT_TIMEOUT = 1
FAULT_OVERLAP = 2
FAULT_MISMATCH = 3


@dataclass(frozen=True)
class Mailbox:
    """A rank's view of all mailboxes inside a kernel. Everything but `layout` and `multicast` is a run-time value.

    Attributes:
        layout: where things lie.
        multicast: whether to publish with the handle's `multicast_ptr`.
        handle: the rank's.
        slot: this call's slot.
        generation: this call's generation.
        outbox: with the delayed transport, where publishes go instead; else None.
    """

    layout: MailboxLayout
    multicast: bool
    handle: Handle
    slot: Uint32
    generation: Uint32
    outbox: Int64 | None

    @property
    def rank(self) -> Int32:
        """This rank."""
        return self.handle.rank

    @property
    def own(self) -> Int64:
        """This rank's mailbox."""
        return self.handle.peers[0]

    def row(self, src_rank: Int32 | int) -> Int64:
        """Bytes to row `src_rank` of this call's slot."""
        return Int64(self.slot) * self.layout.slot_bytes + Int64(src_rank) * self.layout.row_bytes

    def record(self, src_rank: Int32 | int, record: Int32) -> Int64:
        """Bytes to an escape record of this call's slot."""
        return Int64(self.layout.record_offset(Int64(self.slot), Int64(src_rank), Int64(record)))


def outbox_of(state: Int64) -> Int64:
    """Where a rank's state block says that its outbox is."""
    return Int64(ptx.ld_relaxed_gpu_u64(state + mailbox.STATE_OUTBOX * 4))


def send_words(box: Mailbox, k: int, offset: Int64, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes into the mailbox of the k-th rank after this one, alone."""
    if box.outbox is None:
        ptx.st_relaxed_sys_v4(box.handle.peers[k] + offset, words)
    else:
        post(box.outbox, box.handle.peers[k] + offset, words)


def publish_words(box: Mailbox, offset: Int64, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes into every rank's mailbox, this rank's own included."""
    if box.multicast:
        ptx.multimem_st_relaxed_sys_v4(box.handle.multicast_ptr + offset, words)
    else:
        for k in range(box.layout.world_size):
            send_words(box, k, offset, words)


def publish_word(box: Mailbox, offset: Int64, word: Uint32) -> None:
    """Stores 4 bytes into every rank's mailbox, this rank's own included."""
    if box.multicast:
        ptx.multimem_st_relaxed_sys(box.handle.multicast_ptr + offset, word)
    else:
        for peer in box.handle.peers:
            if box.outbox is None:
                ptx.st_relaxed_sys(peer + offset, word)
            else:
                post(box.outbox, peer + offset, (word,))


@cute.jit
def publish_chunk(
    box: Mailbox, row: Int64, chunk: Int32, words: tuple[Uint32, Uint32, Uint32, Uint32], active: Boolean
) -> None:
    """A warp publishes 32 chunks of any bits (R5); lanes whose chunk is not `active` only take part in the vote."""
    reserved = [Boolean((word | Uint32(1)) == Uint32(ESCAPE)) for word in words]
    sent = tuple(word | Uint32(flag) for word, flag in zip(words, reserved, strict=True))
    if active:
        publish_words(box, row + Int64(chunk) * mailbox.CHUNK_BYTES, sent)
    escaped = active & (reserved[0] | reserved[1] | reserved[2] | reserved[3])
    if cute.arch.vote_any_sync(escaped):
        publish_record(box, chunk, words, escaped)


@cute.jit
def publish_record(box: Mailbox, chunk: Int32, words: tuple[Uint32, Uint32, Uint32, Uint32], escaped: Boolean) -> None:
    """A warp publishes which words of its 32 chunks were EMPTY: 4 bits a lane, 16 bits a record word (R5)."""
    lane = cute.arch.lane_idx()
    was_empty = Uint32(0)
    for i in range_constexpr(CHUNK_WORDS):
        was_empty = was_empty | (Uint32(words[i] == Uint32(EMPTY)) << Uint32(i))
    bits = (was_empty * Uint32(escaped)) << Uint32((lane % CHUNK_WORDS) * CHUNK_WORDS)
    bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=1)
    bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=2)
    if lane % CHUNK_WORDS == 0:
        offset = box.record(box.rank, chunk // mailbox.CHUNKS_PER_RECORD) + Int64(lane // CHUNK_WORDS) * 4
        publish_word(box, offset, bits | Uint32(mailbox.RECORD_TAG))
    if escaped:
        ptx.red_add_relaxed_gpu(box.handle.state + mailbox.STATE_ESCAPES * 4, Uint32(1))


def new_wait() -> cute.Tensor:
    """One Int64 register that a thread keeps over a call; see `collect_chunk`."""
    wait = cute.make_rmem_tensor(1, Int64)
    wait[0] = Int64(0)
    return wait


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
def look_at_clock(
    box: Mailbox, words: cute.Tensor, chunk: Int32, src_rank: int, num_rows: cutlass.Constexpr, wait: cute.Tensor
) -> None:
    """After many failed polls: notes the wait, and gives up when it lasted `timeout_ns` or another thread gave up."""
    now = cute.arch.globaltimer()
    if wait[0] == 0:
        wait[0] = now
    waited_us = Uint32((now - wait[0]) // 1000)
    first = Int32(0)
    for i in range_constexpr(num_rows * CHUNK_WORDS - 1, -1, -1):
        if words[i] == Uint32(EMPTY):
            first = Int32(i)
    row = src_rank + first // CHUNK_WORDS
    ptx.red_max_relaxed_gpu(box.handle.state + Int64(mailbox.STATE_WAITS + row) * 4, waited_us)
    if now - wait[0] > box.handle.timeout_ns:
        report(box, FAULT_TIMEOUT, Int32(row), Uint32(chunk * CHUNK_WORDS + first % CHUNK_WORDS), waited_us)
        wait[0] = Int64(-1)
    if ptx.ld_relaxed_gpu(box.handle.state + mailbox.STATE_BROKEN * 4) != 0:
        wait[0] = Int64(-1)


@cute.jit
def report(box: Mailbox, kind: int, src_rank: Int32, word: Uint32, waited_us: Uint32) -> None:
    """Breaks the communicator; the first thread that does writes what it saw to the host and to every fault row."""
    if ptx.atom_cas_relaxed_gpu(box.handle.state + mailbox.STATE_BROKEN * 4, Uint32(0), Uint32(kind)) == 0:
        record = (Uint32(box.rank), Uint32(src_rank), box.generation, box.slot, word, waited_us)
        targets = [peer + box.layout.fault_offset(Int64(box.rank)) for peer in box.handle.peers]
        for target in (box.handle.fault_record, *targets):
            for i in range_constexpr(len(record)):
                ptx.st_relaxed_sys(target + (i + 1) * 4, record[i])
            ptx.st_release_sys(target, Uint32(kind))  # last: whoever reads the kind reads the whole record


@cute.jit
def restore_escapes(
    box: Mailbox,
    words: cute.Tensor,
    chunk: Int32,
    src_rank: int,
    num_rows: cutlass.Constexpr,
    active: Boolean,
    wait: cute.Tensor,
) -> None:
    """A warp that saw an ESCAPE reads the row's record, restores its words, and clears the record once (R3, R5).

    Called when no lane polls any more (R4). `src_rank` is the first of the `num_rows` rows in `words`.
    """
    lane = cute.arch.lane_idx()
    for r in range_constexpr(num_rows):
        seen = Boolean(False)
        for i in range_constexpr(CHUNK_WORDS):
            seen = seen | (words[r * CHUNK_WORDS + i] == Uint32(ESCAPE))
        if cute.arch.vote_any_sync(seen & active):
            addr = box.own + box.record(src_rank + r, chunk // mailbox.CHUNKS_PER_RECORD)
            addr = addr + Int64(lane // CHUNK_WORDS) * 4
            flags = collect_word(box, addr, chunk, src_rank + r, wait)
            bits = flags >> Uint32((lane % CHUNK_WORDS) * CHUNK_WORDS)
            for i in range_constexpr(CHUNK_WORDS):
                was_empty = (words[r * CHUNK_WORDS + i] == Uint32(ESCAPE)) & (((bits >> Uint32(i)) & Uint32(1)) == 1)
                # EMPTY is ESCAPE without its lowest bit
                words[r * CHUNK_WORDS + i] = words[r * CHUNK_WORDS + i] - Uint32(was_empty)
            if flags == Uint32(EMPTY):  # timed out
                for i in range_constexpr(CHUNK_WORDS):
                    words[r * CHUNK_WORDS + i] = Uint32(FILL)
            cute.arch.sync_warp()  # four lanes share a record word: all have read before one clears
            if lane % CHUNK_WORDS == 0:
                ptx.st_relaxed_sys(addr, Uint32(EMPTY))


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
