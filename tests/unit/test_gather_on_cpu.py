# SPDX-License-Identifier: Apache-2.0
"""The all-gather kernel's PTX on the CPU: each rule of docs/mailbox.md that it keeps, with words that arrive late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.collectives.all_gather import AllGatherConfig
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.reduce_scatter import ReduceScatterKernel
from nvcomm.device import FAULT_MISMATCH, FAULT_OVERLAP, FAULT_TIMEOUT
from nvcomm.mailbox import EMPTY, ESCAPE, FAULT_BYTES, STATE_BROKEN, MailboxLayout
from tests.emulator.ranks import Ranks

GRAPH = (32, 4, 96)  # words of three gathers that follow each other, replayed
LAYOUT = MailboxLayout(3, 1024)
THREADS = 32
TIMEOUT_NS = 2_000_000  # of simulated time; what is right waits for a tenth of it


def config(**options) -> AllGatherConfig:
    return AllGatherConfig(LAYOUT, threads=THREADS, **options)


def coded(rank: int, call: int, count: int) -> torch.Tensor:
    """Words that tell their rank, call and index; one in eight is a reserved one."""
    index = torch.arange(count, dtype=torch.int64)
    words = (rank << 28) | (call << 20) | index
    reserved = EMPTY - 2**32 + (index % 16 == 0).long() * (ESCAPE - EMPTY)
    return torch.where(index % 8 == 0, reserved, words).to(torch.int32)


def gathers(ranks, sizes, options=None, *, slow=None, plain=False, present=(0, 1, 2)):
    """Chains of gathers of `sizes` words; returns the number of wrong words. Sites repeat as in a replayed graph."""
    wanted, outs, chains = [], [], [[] for _ in present]
    for call, size in enumerate(sizes):
        xs = [coded(rank, call, size) for rank in range(3)]
        if plain:
            xs = [torch.full((size,), 16 * call + rank, dtype=torch.int32) for rank in range(3)]
        wanted.append(torch.stack(xs))
        outs.append([ranks.put(torch.zeros((3, size), dtype=torch.int32)) for _ in range(3)])
        for chain, rank in zip(chains, present, strict=True):
            site = (call % len(GRAPH) + 1, 0, 0)
            inp = ranks.put(xs[rank])
            chain.append(ranks.gather_launch(options or config(), rank, inp, outs[-1][rank], 4 * size, site))
    ranks.run(chains, slow)
    return sum(
        int((ranks.get(out[rank], want) != want).sum())
        for want, out in zip(wanted, outs, strict=True)
        for rank in present
    )


@pytest.mark.parametrize("pdl", ["safe", "early", "off"])
def test_R1_a_call_does_not_overtake_the_one_before(pdl, seed):
    ranks = Ranks(LAYOUT, seed, timeout_ns=TIMEOUT_NS)
    assert gathers(ranks, GRAPH * 2, config(pdl=pdl)) == 0
    ranks.assert_clean(len(GRAPH) * 2)


@pytest.mark.parametrize("slow", [0, 2])
def test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink(slow, seed):
    ranks = Ranks(LAYOUT, seed, timeout_ns=TIMEOUT_NS, late=True)
    assert gathers(ranks, GRAPH * 3, slow=slow) == 0
    ranks.assert_clean(len(GRAPH) * 3)


@pytest.mark.parametrize("word", [EMPTY, ESCAPE])
def test_R5_words_that_mean_something_else_arrive(word, seed):
    ranks = Ranks(LAYOUT, seed, timeout_ns=TIMEOUT_NS, late=True)
    for call, size in enumerate((8, 132, 4)):
        x = torch.full((size,), word - 2**32, dtype=torch.int32)
        outs = [ranks.put(torch.zeros((3, size), dtype=torch.int32)) for _ in range(3)]
        ranks.run([[ranks.gather_launch(config(), r, ranks.put(x), outs[r], 4 * size, (1, 0, 0))] for r in range(3)])
        assert all(torch.equal(ranks.get(out, x.repeat(3, 1)), x.repeat(3, 1)) for out in outs), call
    ranks.assert_clean(3)


def test_R6_the_count_wraps(seed):
    ranks = Ranks(LAYOUT, seed, timeout_ns=TIMEOUT_NS, generation=2**32 - 2, late=True)
    assert gathers(ranks, (4, 8, 12, 16, 4)) == 0
    ranks.assert_clean(5, generation=2**32 - 2)


def test_R7_with_checks_overlapping_calls_are_recorded(seed):
    """Two launches of one rank at once, as two graphs on two streams would be."""
    ranks = Ranks(LAYOUT, seed, timeout_ns=600_000, late=True)
    x = ranks.put(torch.zeros(32, dtype=torch.int32))
    out = ranks.put(torch.zeros((3, 32), dtype=torch.int32))
    both = [[ranks.gather_launch(config(device_checks=True), 0, x, out, 128, (site, 0, 0))] for site in (1, 2)]
    ranks.run(both)
    assert ranks.fault(0)[:3] == [FAULT_OVERLAP, 0, 0]


def test_R10_a_rank_that_does_not_come_is_named_in_time_and_to_everybody(seed):
    """Timeout of 0.6 ms; then a call on a broken rank publishes nothing, waits for nobody and fills."""
    ranks = Ranks(LAYOUT, seed, timeout_ns=600_000)
    assert gathers(ranks, (8,)) == 0
    assert gathers(ranks, (8,), present=(0, 2), plain=True) == 2 * 8
    for rank in (0, 2):
        kind, who, root, generation, slot, word, waited_us = ranks.fault(rank)
        assert (kind, who, root, generation, slot) == (FAULT_TIMEOUT, rank, 1, 1, 1)
        assert word in (0, 4)  # the first of either chunk
        assert 600 <= waited_us < 1200
        for mailbox in ranks.mailboxes:
            at = mailbox + LAYOUT.fault_offset(rank)
            row = np.frombuffer(ranks.memory.bytes_at(at, FAULT_BYTES), np.uint32)
            assert row[:3].tolist() == [FAULT_TIMEOUT, rank, 1]
    before = [ranks.memory.bytes_at(mailbox, LAYOUT.size_bytes) for mailbox in ranks.mailboxes]
    assert gathers(ranks, (96,), present=(0, 2)) == 2 * 3 * 96
    assert [ranks.memory.bytes_at(mailbox, LAYOUT.size_bytes) for mailbox in ranks.mailboxes] == before
    assert STATE_BROKEN == 3


@pytest.mark.parametrize("differ", ["nothing", "size", "dtype", "tag"])
def test_R11_with_checks_ranks_agree_on_the_call(differ, seed):
    ranks = Ranks(LAYOUT, seed, timeout_ns=600_000, late=True)
    chains = []
    for rank in range(3):
        size = 16 if differ == "size" and rank == 1 else 8
        call = (1, 5 if differ == "dtype" and rank == 1 else 4, 9 if differ == "tag" and rank == 1 else 0)
        out = ranks.put(torch.zeros((3, size), dtype=torch.int32))
        x = ranks.put(torch.ones(size, dtype=torch.int32))
        chains.append([ranks.gather_launch(config(device_checks=True), rank, x, out, 4 * size, call)])
    ranks.run(chains)
    kinds = {ranks.fault(rank)[0] for rank in range(3)}
    assert kinds == ({0} if differ == "nothing" else {FAULT_MISMATCH})


def test_R12_a_rank_without_rows_waits_for_everybody(seed):
    """One row for three ranks: two of them own nothing, and must not run ahead of the first, which is slow."""
    layout, calls = MailboxLayout(3, 1024), 5
    ranks = Ranks(layout, seed, timeout_ns=TIMEOUT_NS)
    options = ReduceConfig(layout, "fp32", threads=THREADS)
    outs = [ranks.put(torch.zeros(8)) for _ in range(calls)]
    chains = []
    for rank in range(3):
        xs = [ranks.put(torch.full((8,), float(10 * call + rank))) for call in range(calls)]
        tensors = [(x, outs[call] if rank == 0 else 0) for call, x in enumerate(xs)]
        chains.append([ranks.reduce_launch(ReduceScatterKernel, options, rank, *one, [1, 32], 1) for one in tensors])
    ranks.run(chains, slow=0)
    for call, out in enumerate(outs):
        assert ranks.get(out, torch.zeros(8)).tolist() == [30.0 * call + 3] * 8
    ranks.assert_clean(calls)


def test_words_really_are_late(seed):
    """The negative control of the machine: without a wait for the own copy, say, there must be something to lose."""
    ranks = Ranks(LAYOUT, seed, timeout_ns=TIMEOUT_NS, late=True)
    x, out = ranks.put(torch.ones(32, dtype=torch.int32)), ranks.put(torch.zeros((3, 32), dtype=torch.int32))
    flying = []
    land = ranks.memory.land

    def counted(share):
        flying.append(ranks.memory.num_flying)
        land(share)

    ranks.memory.land = counted
    ranks.run([[ranks.gather_launch(config(), r, x, out, 128, (1, 0, 0))] for r in range(3)])
    assert max(flying) > 30
