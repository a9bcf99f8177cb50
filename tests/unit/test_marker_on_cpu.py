# SPDX-License-Identifier: Apache-2.0
"""The markers of reset() (docs/mailbox.md R10b): their kernel on the CPU, with words of a failed call under way."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cutlass")

from nvcomm import jit
from nvcomm.collectives.marker import MarkerConfig, MarkerKernel, fake_args
from nvcomm.mailbox import EMPTY, NUM_SLOTS, MailboxLayout
from tests.emulator.program import Launch, Program
from tests.emulator.ranks import Ranks

LAYOUTS = [MailboxLayout(3, 1024), MailboxLayout(2, 5000)]
THREADS = 32
BLANK = 0


@functools.cache
def program(layout: MailboxLayout) -> Program:
    config = MarkerConfig(layout, multicast=False, threads=THREADS)
    return Program(jit.artifacts(MarkerKernel(config), *fake_args(layout.world_size), arch="sm_90a").ptx)


def words(ranks: Ranks, rank: int) -> np.ndarray:
    """Every word of a mailbox that calls publish."""
    raw = ranks.memory.bytes_at(ranks.mailboxes[rank], ranks.layout.faults_base)
    return np.frombuffer(raw, np.uint32)


def blank(ranks: Ranks) -> None:
    """What each rank does first; from now on EMPTY travels like any other word, and only the blank lands at once."""
    for start in ranks.mailboxes:
        ranks.memory.arrives_late(start, ranks.layout.faults_base, BLANK)
        for at in range(start, start + ranks.layout.faults_base, 4):
            ranks.memory.write(at, 4, BLANK)


def mark(ranks: Ranks, who, ctas: int = 2) -> None:
    """Launches the kernel of some ranks; nothing has to have landed afterwards."""
    chains = []
    for rank in who:
        *peers, multicast_ptr, state, _, _ = ranks.box(rank)
        parameters = [*peers, multicast_ptr, state, rank, EMPTY]
        chains.append([Launch(program(ranks.layout), parameters, (ctas, 1, 1), THREADS)])
    ranks.machine.run(chains)


def late_words(ranks: Ranks, seed: int) -> None:
    """Each rank's own rows in every mailbox: words and records of a call that failed, still under way."""
    layout, random = ranks.layout, np.random.default_rng(seed)
    for start in ranks.mailboxes:
        for slot in range(NUM_SLOTS):
            for src_rank in range(layout.world_size):
                places = [
                    layout.row_offset(slot, src_rank) + 4 * int(i) for i in random.integers(0, layout.row_words, 9)
                ]
                places.append(layout.record_offset(slot, src_rank, 0))
                for place in places:
                    ranks.memory.write(start + place, 4, 0xABC00000 + place)


def hidden(ranks: Ranks) -> int:
    """Words that read EMPTY while something is under way to them."""
    flying = set(ranks.memory._flying_addr.tolist())
    return sum(
        start + 4 * int(i) in flying
        for rank, start in enumerate(ranks.mailboxes)
        for i in np.flatnonzero(words(ranks, rank) == EMPTY)
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=["whole", "uneven"])
def test_R10b_markers_cover_the_own_rows_and_nothing_else(layout, seed):
    ranks = Ranks(layout, seed, late=True)
    blank(ranks)
    mark(ranks, range(1, layout.world_size))
    ranks.memory.drain()
    want = np.full(layout.faults_base // 4, EMPTY, np.uint32)
    for slot in range(NUM_SLOTS):  # rank 0 published none
        parts = [(layout.row_offset(slot, 0), layout.row_bytes), (layout.header_offset(slot, 0), 32)]
        parts.append((layout.record_offset(slot, 0, 0), 32 * layout.records_per_row))
        for start, size in parts:
            want[start // 4 : (start + size) // 4] = BLANK
    for rank in range(layout.world_size):
        assert (words(ranks, rank) == want).all()
        rest = ranks.memory.bytes_at(ranks.mailboxes[rank] + layout.faults_base, layout.size_bytes - layout.faults_base)
        assert not any(rest)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["whole", "uneven"])
def test_R10b_a_word_that_reads_EMPTY_has_no_older_one_behind_it(layout, seed):
    ranks = Ranks(layout, seed, late=True)
    late_words(ranks, seed)
    assert ranks.memory.num_flying > 10
    blank(ranks)
    mark(ranks, range(layout.world_size))
    while ranks.memory.num_flying:
        assert hidden(ranks) == 0
        ranks.memory.land(0.3)
    assert all((words(ranks, rank) == EMPTY).all() for rank in range(layout.world_size))


def test_R10b_without_the_blank_nobody_can_tell(seed):
    """The negative control: the mailbox was EMPTY all the time, and words are under way to it."""
    ranks = Ranks(LAYOUTS[0], seed, late=True)
    late_words(ranks, seed)
    assert hidden(ranks) > 0


def test_A2_off_a_marker_that_overtakes_leaves_an_old_word(seed, monkeypatch):
    """The negative control of the assumption: the newest store to an address lands first."""
    ranks = Ranks(LAYOUTS[0], seed, late=True)
    land = ranks.memory.land

    def newest_first(share):
        memory = ranks.memory
        memory._flying_addr, memory._flying_word = memory._flying_addr[::-1].copy(), memory._flying_word[::-1].copy()
        land(share)
        memory._flying_addr, memory._flying_word = memory._flying_addr[::-1].copy(), memory._flying_word[::-1].copy()

    late_words(ranks, seed)
    blank(ranks)
    monkeypatch.setattr(ranks.memory, "land", newest_first)
    mark(ranks, range(3))
    ranks.memory.drain()
    assert any((words(ranks, rank) != EMPTY).any() for rank in range(3))
