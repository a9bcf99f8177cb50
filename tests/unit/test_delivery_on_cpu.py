# SPDX-License-Identifier: Apache-2.0
"""The delayed transport's agent and outbox on the CPU: the count of entries goes over the end of 32 bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit, outbox
from nvcomm.collectives import delivery
from nvcomm.collectives.all_gather import AllGatherConfig
from nvcomm.collectives.delivery import DeliverKernel, EndKernel
from nvcomm.mailbox import STATE_OUTBOX, MailboxLayout
from tests.emulator.program import Launch, Program
from tests.emulator.ranks import Ranks

LAYOUT = MailboxLayout(2, 2048)  # of no other test: programs are kept, and this one's ring is small
CONFIG = AllGatherConfig(LAYOUT, threads=32, delayed=True)
WRAP = 1 << 32
AGENT_THREADS, RING = 32, 64


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """A ring that three gathers fill several times."""
    for module in (outbox, delivery):
        monkeypatch.setattr(module, "AGENT_THREADS", AGENT_THREADS)
        monkeypatch.setattr(module, "RING", RING)
    monkeypatch.setattr(outbox, "TURNS", 2 * (WRAP // RING))
    monkeypatch.setattr(outbox, "ENTRIES", outbox.NEXT + AGENT_THREADS * 4)
    monkeypatch.setattr(delivery, "ENTRIES", outbox.ENTRIES)


@functools.cache
def program(kernel, *fake_args) -> Program:
    return Program(jit.artifacts(kernel(), *fake_args, make_fake_stream(), arch="sm_90a").ptx)


def outbox_at(head: int) -> np.ndarray:
    """An outbox that has delivered `head` entries and holds none."""
    words = np.zeros((outbox.ENTRIES + RING * outbox.ENTRY_BYTES) // 4, np.uint32)
    words[outbox.HEAD // 4] = head
    threads = np.arange(AGENT_THREADS, dtype=np.int64)
    upcoming = head + (threads - head) % AGENT_THREADS
    words[outbox.NEXT // 4 :][: len(threads)] = (upcoming - threads) % WRAP
    places = np.arange(RING, dtype=np.int64)
    laps = (head + (places - head) % RING) % WRAP // RING
    turns = words[(outbox.ENTRIES + outbox.ENTRY_TURN) // 4 :: outbox.ENTRY_BYTES // 4]
    turns[:] = 2 * laps
    return words


@pytest.mark.parametrize("head", [0, WRAP - RING, WRAP - 40])
def test_entries_are_delivered_whatever_their_count(head, seed):
    ranks = Ranks(LAYOUT, seed)
    boxes = [ranks.memory.allocate(outbox_at(head)) for _ in range(2)]
    for state, box in zip(ranks.states, boxes, strict=True):
        ranks.memory.write(state + 4 * STATE_OUTBOX, 8, box)
    sizes = (64, 8, 200)
    xs = [[torch.arange(size, dtype=torch.int32) + 1000 * (rank + 1) for rank in range(2)] for size in sizes]
    outs = [[ranks.put(torch.zeros((2, size), dtype=torch.int32)) for _ in range(2)] for size in sizes]
    chains = []
    for rank, box in enumerate(boxes):
        calls = [
            ranks.gather_launch(CONFIG, rank, ranks.put(x[rank]), out[rank], 4 * size, (1, 0, 0))
            for x, out, size in zip(xs, outs, sizes, strict=True)
        ]
        end = Launch(program(EndKernel, Int64(0)), [box], (1, 1, 1), 32)
        agent = Launch(program(DeliverKernel, Int64(0), Uint32(0)), [box, 7], (1, 1, 1), AGENT_THREADS)
        chains += [[*calls, end], [agent]]
    ranks.run(chains)
    for x, out in zip(xs, outs, strict=True):
        want = torch.stack(x)
        assert all(torch.equal(ranks.get(addr, want), want) for addr in out)
    ranks.assert_clean(len(sizes))
