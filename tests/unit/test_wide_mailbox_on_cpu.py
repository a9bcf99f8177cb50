# SPDX-License-Identifier: Apache-2.0
"""Kernels' PTX on the CPU with the largest mailboxes, whose parts lie further apart than 31 or 32 bits count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.collectives.all_gather import AllGatherConfig
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_ll import AllReduceLLKernel
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.collectives.reduce_scatter import ReduceScatterKernel
from nvcomm.mailbox import EMPTY, NUM_SLOTS, RECORD_WORDS, MailboxLayout
from tests.emulator import ranks as emulated
from tests.emulator.memory import Memory

WIDE = MailboxLayout(5, 1 << 30)
RANKS = range(WIDE.world_size)
FAR = 1 << 40  # from here on there are mailboxes, each that far from the next
CALLS = NUM_SLOTS + 1


class WideMemory(Memory):
    """Holds of mailboxes only the words that are not EMPTY, and remembers every place that was written."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.words: dict[int, int] = {}
        self.written: set[int] = set()

    def load(self, addr, size, count=1):
        if (addr < FAR).all():
            return super().load(addr, size, count)
        found = [[self.words.get(int(one) + 4 * i, EMPTY) for i in range(count)] for one in addr]
        return np.array(found, np.uint32)

    def store(self, addr, values):
        if (addr < FAR).all():
            super().store(addr, values)
            return
        for one, words in zip(addr.tolist(), values.tolist(), strict=True):
            places = range(one, one + 4 * len(words), 4)
            self.words.update(zip(places, words, strict=True))
            self.written.update(places)
        self.words = {place: word for place, word in self.words.items() if word != EMPTY}


@pytest.fixture
def ranks(seed, monkeypatch):
    monkeypatch.setattr(emulated, "Memory", WideMemory)
    ranks = emulated.Ranks(MailboxLayout(WIDE.world_size, 1024), seed)
    ranks.mailboxes = [FAR * (rank + 1) for rank in RANKS]
    return ranks


def places(offsets) -> set[int]:
    """The same words of every mailbox."""
    return {FAR * (rank + 1) + offset for rank in RANKS for offset in offsets}


def rows(num_words: int) -> set[int]:
    every = [WIDE.row_offset(slot, rank) for slot in range(NUM_SLOTS) for rank in RANKS]
    return {start + 4 * i for start in every for i in range(num_words)}


def test_the_parts_are_wide_apart():
    assert 1 << 31 <= WIDE.row_offset(0, 2) < 1 << 32 <= WIDE.row_offset(0, 4) < WIDE.slot_bytes


def test_a_gather_with_escapes_and_headers(ranks):
    config = AllGatherConfig(WIDE, threads=32, device_checks=True)
    for call in range(CALLS):
        xs = [torch.arange(8, dtype=torch.int32) + 100 * call + 10 * rank for rank in RANKS]
        for x in xs:
            x[call] = EMPTY - 2**32
        outs = [ranks.put(torch.zeros((5, 8), dtype=torch.int32)) for _ in RANKS]
        ranks.run([[ranks.gather_launch(config, r, ranks.put(xs[r]), outs[r], 32, (call + 1, 0, 0))] for r in RANKS])
        assert all(torch.equal(ranks.get(out, torch.stack(xs)), torch.stack(xs)) for out in outs)
        assert not ranks.memory.words
    every = [(slot, rank) for slot in range(NUM_SLOTS) for rank in RANKS]
    records = {WIDE.record_offset(*one, 0) + 4 * i for one in every for i in range(RECORD_WORDS)}
    headers = {WIDE.header_offset(*one) + 4 * i for one in every for i in range(8)}
    assert ranks.memory.written == places(rows(8) | records | headers)


@pytest.mark.parametrize("kernel", [AllReduceLLKernel, AllReduceTwoShotKernel, ReduceScatterKernel])
def test_sums(kernel, ranks):
    """640 values: 160 chunks, so that each rank owns 32 of them in two-shot."""
    config = ReduceConfig(WIDE, "fp32", threads=32)
    scatters = kernel is ReduceScatterKernel
    for call in range(CALLS):
        xs = [torch.arange(640, dtype=torch.float32) + 1000 * call + rank for rank in RANKS]
        outs = [ranks.put(torch.zeros(128 if scatters else 640)) for _ in RANKS]
        sizes = [5, 512] if scatters else [2560]
        ranks.run([[ranks.reduce_launch(kernel, config, r, ranks.put(xs[r]), outs[r], sizes, 1)] for r in RANKS])
        want = sum(xs).view(5, -1)
        for rank, out in enumerate(outs):
            part = want[rank] if scatters else want.reshape(-1)
            assert torch.equal(ranks.get(out, part), part)
        assert not ranks.memory.words
    want = places(rows(128 if scatters else 640))
    if kernel is AllReduceTwoShotKernel:  # a rank sends another what that one owns, and its own sums
        want -= {
            FAR * (dst_rank + 1) + WIDE.row_offset(slot, rank) + 512 * owner + byte
            for slot in range(NUM_SLOTS)
            for dst_rank, rank, owner in itertools.product(RANKS, repeat=3)
            for byte in range(0, 512, 4)
            if owner not in (dst_rank, rank)
        }
    assert ranks.memory.written == want
