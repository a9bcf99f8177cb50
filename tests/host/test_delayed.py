# SPDX-License-Identifier: Apache-2.0
"""The delayed transport: everything arrives late and in any order, and the protocol does not mind."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from nvcomm.errors import NvcommError
from nvcomm.host.transport import DelayedTransport


def row(rank: int, call: int, size: int) -> torch.Tensor:
    """Every word names its rank, call and place."""
    index = torch.arange(size // 4, dtype=torch.int32)
    return (index + 1000 * rank + 100_000 * call).view(torch.uint8)


def bad_words(world, gather, sizes) -> int:
    def work(engine):
        bad = 0
        for call, size in enumerate(sizes):
            out = gather(engine, row(engine.rank, call, size)).view(torch.int32)
            for rank, seen in enumerate(out):
                bad += int((seen != row(rank, call, size).view(torch.int32)).sum())
            if bad:
                break
        return bad

    return sum(result for result in world.run(work) if not isinstance(result, Exception))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mixed_sizes_are_right(ranks, gather, world_size, seed):
    sizes = np.random.default_rng(seed).choice([16, 64, 512, 4096], 200).tolist()
    world = ranks(world_size, transport="delayed", seed=seed)
    assert bad_words(world, gather, sizes) == 0
    world.assert_audit()


def test_escapes_and_headers_travel_late_too(ranks, gather, seed):
    x = torch.full((300,), -327686, dtype=torch.int32)  # EMPTY

    def work(engine):
        for call in range(40):
            size = 1 + call * 7
            assert torch.equal(gather(engine, x[:size]).view(torch.int32), torch.stack([x[:size]] * 2))

    ranks(2, transport="delayed", seed=seed, device_checks=1).run_clean(work)


def test_late_copy_reads_stale_words_within_seconds(ranks, gather, seed):
    """Nothing is arranged: the own copy is late now and then."""
    sizes = np.random.default_rng(seed).choice([16, 64, 512], 2000).tolist()
    started = time.monotonic()
    world = ranks(2, transport="delayed", seed=seed, timeout_s=1.0, mutations=frozenset({"late-copy"}))
    assert bad_words(world, gather, sizes) > 0
    assert time.monotonic() - started < 20


def test_pieces_arrive_out_of_order_but_in_order_at_one_address(seed):
    transport = DelayedTransport(seed)
    memory = np.zeros((2, 256), np.uint32)
    out_of_order = 0
    for value in range(1, 60):
        transport.begin()
        for lane in (0, 1):
            transport.store(lane, memory[lane], np.full(256, value, np.uint32))
        if value % 4:
            continue  # the next publish to the same addresses is on its way before this one has landed
        while not (memory == value).all():
            now = memory[0].copy()
            assert (now <= value).all()
            out_of_order += bool(now[0] < now[-1])
        transport.drain(5.0)
    transport.close()
    assert (memory[:, 0] == 59).all()
    assert out_of_order > 0


def test_words_may_change_after_the_call(seed):
    transport = DelayedTransport(seed)
    memory, words = np.zeros(64, np.uint32), np.full(64, 7, np.uint32)
    transport.begin()
    transport.store(0, memory, words)
    words[:] = 8
    transport.close()
    assert (memory == 7).all()


def test_drain_is_bounded(seed):
    transport = DelayedTransport(seed)
    transport._floor[0] = time.monotonic() + 0.5
    transport.store(0, np.zeros(4, np.uint32), np.ones(4, np.uint32))
    with pytest.raises(NvcommError, match="1 stores|2 stores|3 stores|4 stores"):
        transport.drain(0.05)
    transport.close()
