# SPDX-License-Identifier: Apache-2.0
"""Properties of the mailbox layout: what the rules need of places, slots and reserved words."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvcomm import mailbox as mb

layouts = st.builds(
    mb.MailboxLayout,
    world_size=st.integers(1, 8),
    max_bytes=st.one_of(st.integers(1, 4096), st.integers(1, 4 << 20), st.sampled_from([4 << 20, 16, 511, 512, 513])),
)


def _regions(layout: mb.MailboxLayout) -> list[tuple[int, int, str]]:
    """Every row, record row, header and fault of a mailbox as (first byte, end, name)."""
    record_row_bytes = layout.records_per_row * mb.RECORD_BYTES
    regions = []
    for slot in range(mb.NUM_SLOTS):
        for src_rank in range(layout.world_size):
            row = layout.row_offset(slot, src_rank)
            records = layout.record_offset(slot, src_rank, 0)
            header = layout.header_offset(slot, src_rank)
            name = f"slot {slot} rank {src_rank}"
            regions += [
                (row, row + layout.row_bytes, f"row {name}"),
                (records, records + record_row_bytes, f"records {name}"),
                (header, header + mb.HEADER_BYTES, f"header {name}"),
            ]
    for src_rank in range(layout.world_size):
        fault = layout.fault_offset(src_rank)
        regions.append((fault, fault + mb.FAULT_BYTES, f"fault {src_rank}"))
    return sorted(regions)


@given(layouts)
def test_R3_no_two_places_share_a_byte_and_none_is_wasted(layout: mb.MailboxLayout) -> None:
    regions = _regions(layout)
    for (_, end, name), (start, _, next_name) in pairwise(regions):
        assert end == start, f"{name} ends at {end}, {next_name} begins at {start}"
    assert regions[0][0] == 0
    assert regions[-1][1] == layout.size_bytes


@given(layouts, st.data())
def test_R3_a_row_stays_where_it_is_whatever_a_call_carries(layout: mb.MailboxLayout, data: st.DataObject) -> None:
    """Places depend on slot, rank and `max_bytes`; a payload of any size fits in its row and in its records."""
    num_bytes = data.draw(st.integers(0, layout.max_bytes))
    chunks = mb.num_chunks(num_bytes)
    assert chunks * mb.CHUNK_BYTES >= num_bytes > (chunks - 1) * mb.CHUNK_BYTES or num_bytes == chunks == 0
    assert chunks * mb.CHUNK_BYTES <= layout.row_bytes
    assert mb.num_records(chunks) <= layout.records_per_row
    if chunks:
        assert (chunks - 1) // mb.CHUNKS_PER_RECORD == mb.num_records(chunks) - 1


def test_R3_rows_packed_by_the_size_of_the_call_would_overlap() -> None:
    """The negative control: rows placed by the call's size, as in the known-bad protocol, share bytes across calls."""
    small = mb.MailboxLayout(world_size=4, max_bytes=512)
    large = mb.MailboxLayout(world_size=4, max_bytes=2048)
    rows = [(small.row_offset(0, 1), small.row_bytes, 1), (large.row_offset(0, 0), large.row_bytes, 0)]
    (a, a_bytes, a_rank), (b, b_bytes, b_rank) = rows
    assert a_rank != b_rank
    assert a < b + b_bytes
    assert b < a + a_bytes


@given(layouts)
def test_R4_and_R5_alignment(layout: mb.MailboxLayout) -> None:
    """Vector access needs 16 bytes, and a warp's 32 chunks must belong to one escape record."""
    assert layout.row_bytes % (mb.CHUNKS_PER_RECORD * mb.CHUNK_BYTES) == 0
    assert layout.row_words * mb.WORD_BYTES == layout.row_bytes
    assert layout.row_bytes - layout.max_bytes < mb.CHUNKS_PER_RECORD * mb.CHUNK_BYTES
    for start, _, name in _regions(layout):
        alignment = mb.CHUNK_BYTES if name.startswith("row") else mb.RECORD_BYTES
        assert start % alignment == 0, name


@given(layouts, st.data())
def test_R5_records_of_a_row_follow_each_other(layout: mb.MailboxLayout, data: st.DataObject) -> None:
    slot = data.draw(st.integers(0, mb.NUM_SLOTS - 1))
    src_rank = data.draw(st.integers(0, layout.world_size - 1))
    record = data.draw(st.integers(0, layout.records_per_row - 1))
    first = layout.record_offset(slot, src_rank, 0)
    assert layout.record_offset(slot, src_rank, record) == first + record * mb.RECORD_BYTES
    assert layout.records_base <= first
    assert first + layout.records_per_row * mb.RECORD_BYTES <= layout.headers_base


@given(layouts)
def test_everything_armed_with_EMPTY_lies_before_the_faults(layout: mb.MailboxLayout) -> None:
    """One fill up to `faults_base` arms a mailbox; faults hold 0 instead."""
    for _, end, name in _regions(layout):
        assert (end <= layout.faults_base) != name.startswith("fault")


@given(st.integers(0, mb.NUM_SLOTS - 1), st.integers(1, 64))
def test_R6_slots_take_turns_across_the_wrap_of_the_counter(slot: int, calls: int) -> None:
    generation = 0xFFFFFFFE
    seen = []
    for _ in range(calls):
        seen.append(slot)
        slot, generation = mb.next_slot(slot), mb.next_generation(generation)
        assert 0 <= generation <= 0xFFFFFFFF
    assert all(before != after for before, after in pairwise(seen))
    for window in range(len(seen) - mb.NUM_SLOTS + 1):
        assert len(set(seen[window : window + mb.NUM_SLOTS])) == mb.NUM_SLOTS
    assert generation == (0xFFFFFFFE + calls) % 2**32


@pytest.mark.parametrize("num_slots", [3, 5, 6, 7])
def test_R6_slots_derived_from_the_counter_repeat_at_the_wrap(num_slots: int) -> None:
    """The negative control: 2**32 is no multiple of these, so `generation % num_slots` uses a slot out of turn."""
    last, first = 0xFFFFFFFF, mb.next_generation(0xFFFFFFFF)
    assert (last % num_slots + 1) % num_slots != first % num_slots


RESERVED = (mb.EMPTY, mb.ESCAPE)


@pytest.mark.parametrize("word", RESERVED)
def test_R5_reserved_words_are_not_a_number_in_every_float_type(word: int) -> None:
    words = torch.tensor([word - (1 << 32)], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.isnan(words.view(dtype)).all(), dtype
    assert np.isnan(np.frombuffer(struct.pack("<I", word), np.float32)).all()


@pytest.mark.parametrize("word", RESERVED)
def test_R5_reserved_words_are_rare_in_integer_data(word: int) -> None:
    common = {0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000}  # -1, INT_MAX, and INT_MIN, which is also -0.0
    halves = {word & 0xFFFF, word >> 16}
    assert word not in common
    assert halves.isdisjoint({0, 1, 0xFFFF, 0x7FFF, 0x8000})


def test_R5_two_reserved_words_found_with_one_or() -> None:
    assert mb.EMPTY != mb.ESCAPE
    assert mb.EMPTY | 1 == mb.ESCAPE | 1 == mb.ESCAPE


@given(st.one_of(st.integers(0, 0xFFFFFFFF), st.sampled_from([mb.EMPTY - 1, mb.EMPTY, mb.ESCAPE, mb.ESCAPE + 1])))
def test_R5_is_reserved(word: int) -> None:
    assert mb.is_reserved(word) == (word in RESERVED)


@given(st.integers(0, (1 << mb.RECORD_BITS) - 1))
def test_R5_a_record_word_never_looks_empty(bits: int) -> None:
    """Whatever 16 flags it carries, a word of a record is an ordinary payload word."""
    assert not mb.is_reserved(mb.RECORD_TAG | bits)
    assert (mb.RECORD_TAG | bits) & ((1 << mb.RECORD_BITS) - 1) == bits


def test_R5_a_record_has_a_flag_for_each_of_its_words() -> None:
    assert mb.RECORD_WORDS * mb.RECORD_BITS == mb.CHUNKS_PER_RECORD * mb.CHUNK_WORDS


def test_the_state_block_is_read_in_one_chunk() -> None:
    places = (mb.STATE_SLOT, mb.STATE_GENERATION, mb.STATE_BUSY, mb.STATE_BROKEN)
    assert sorted(places) == [0, 1, 2, 3]
    assert len(places) * mb.WORD_BYTES == mb.CHUNK_BYTES
    assert mb.STATE_ARRIVED not in places
    assert mb.STATE_ARRIVED < mb.STATE_WORDS
