# SPDX-License-Identifier: Apache-2.0
"""The mailbox: reserved words, slots and addresses. Pure arithmetic.

Kernels, host code, the protocol explorer and the tests all take it from here, so they cannot drift apart
(docs/mailbox.md). Every method is plain `+` and `*`: arguments may be Python integers or CuTe DSL values.

One rank's mailbox, its receive memory, in bytes from its base:

    slots     NUM_SLOTS x world_size rows of `row_bytes`; row r of a slot is written by rank r alone (R3)
    records   NUM_SLOTS x world_size x records_per_row x 8 words: the escape records (R5)
    headers   NUM_SLOTS x world_size x 8 words: what a rank says it is calling, with device checks only (R11)
    faults    world_size x 8 words: what a rank that timed out saw (R10)

Slots, records and headers hold EMPTY in every word between calls; faults hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass

# Ranks compare it when they meet: raise it with every change of what lies where, or of what a word means.
LAYOUT_VERSION = 1

WORD_BYTES = 4
CHUNK_BYTES = 16
CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES

# R5. Both are NaN as fp32 and as two bf16 or fp16 halves, neither is -1, INT_MIN or -0.0, and they differ in the
# lowest bit alone: `word | 1 == ESCAPE` finds either of them.
EMPTY = 0xFFFAFFFA
ESCAPE = 0xFFFAFFFB

# Two slots are enough because a rank clears what it collected before it publishes again (R1, R3): with both rules
# the explorer finds no failure, and a smaller mailbox stays in the L2 cache. See docs/mailbox.md, "How many slots".
NUM_SLOTS = 2
GENERATION_MASK = 0xFFFFFFFF

# An escape record covers the 128 words of 32 chunks: 8 words, each 16 flag bits under a tag that EMPTY cannot equal.
CHUNKS_PER_RECORD = 32
RECORD_WORDS = 8
RECORD_BITS = 16
RECORD_TAG = 0x5EC00000
RECORD_BYTES = RECORD_WORDS * WORD_BYTES

HEADER_WORDS = 8
HEADER_BYTES = HEADER_WORDS * WORD_BYTES
FAULT_WORDS = 8
FAULT_BYTES = FAULT_WORDS * WORD_BYTES

# The state block of a rank, in its own memory and never written by a peer (R6). The first four words are read in
# one 16-byte load. BYTES and OUTBOX are 64 bits wide; WAITS holds one longest wait, in microseconds, for each source
# rank; OUTBOX is where the delayed transport (tests, stress) keeps what is on its way; ENDED counts CTAs, with device
# checks only.
STATE_SLOT, STATE_GENERATION, STATE_BUSY, STATE_BROKEN, STATE_ARRIVED, STATE_ESCAPES = range(6)
STATE_BYTES = 6
STATE_WAITS = 8
STATE_OUTBOX = 16
STATE_ENDED = 18
STATE_WORDS = 32
MAX_WORLD_SIZE = 8


def next_slot(slot: int) -> int:
    """The slot of the next generation. Stepped beside the counter, which wraps at 2**32 (R6)."""
    return (slot + 1) % NUM_SLOTS


def next_generation(generation: int) -> int:
    """The generation after `generation`, an unsigned 32-bit count."""
    return (generation + 1) & GENERATION_MASK


def is_reserved(word: int) -> bool:
    """Whether a payload word may not travel as it is (R5)."""
    return (word | 1) == ESCAPE


def num_chunks(num_bytes: int) -> int:
    """Chunks that carry `num_bytes`; the last one travels whole, padded with 0."""
    return -(-num_bytes // CHUNK_BYTES)


def num_records(chunks: int) -> int:
    """Escape records that cover `chunks` chunks."""
    return -(-chunks // CHUNKS_PER_RECORD)


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Where everything lies in a mailbox of `world_size` rows of `max_bytes` each.

    Rows start at the same place whatever the size of a call (R3), and hold whole escape records, so that a warp's
    32 chunks never straddle two of them.
    """

    world_size: int
    max_bytes: int

    @property
    def records_per_row(self) -> int:
        """Escape records of a row."""
        return num_records(num_chunks(self.max_bytes))

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.records_per_row * CHUNKS_PER_RECORD * CHUNK_BYTES

    @property
    def row_words(self) -> int:
        """32-bit words of a row."""
        return self.row_bytes // WORD_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.world_size * self.row_bytes

    @property
    def records_base(self) -> int:
        """Where the escape records begin."""
        return NUM_SLOTS * self.slot_bytes

    @property
    def headers_base(self) -> int:
        """Where the headers begin."""
        return self.records_base + NUM_SLOTS * self.world_size * self.records_per_row * RECORD_BYTES

    @property
    def faults_base(self) -> int:
        """Where the fault row begins; everything before it is armed with EMPTY."""
        return self.headers_base + NUM_SLOTS * self.world_size * HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole mailbox."""
        return self.faults_base + self.world_size * FAULT_BYTES

    def row_offset(self, slot: int, src_rank: int) -> int:
        """Bytes to row `src_rank` of `slot`."""
        return slot * self.slot_bytes + src_rank * self.row_bytes

    def record_offset(self, slot: int, src_rank: int, record: int) -> int:
        """Bytes to escape record `record` of a row: its chunks are 32 * record to 32 * record + 31."""
        row = slot * self.world_size + src_rank
        return self.records_base + row * (self.records_per_row * RECORD_BYTES) + record * RECORD_BYTES

    def header_offset(self, slot: int, src_rank: int) -> int:
        """Bytes to the header that `src_rank` publishes in `slot`."""
        return self.headers_base + (slot * self.world_size + src_rank) * HEADER_BYTES

    def fault_offset(self, src_rank: int) -> int:
        """Bytes to the fault record of `src_rank`."""
        return self.faults_base + src_rank * FAULT_BYTES
