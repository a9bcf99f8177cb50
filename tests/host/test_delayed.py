# SPDX-License-Identifier: Apache-2.0
"""The delayed transport: everything arrives late and in any order, and the protocol does not mind."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from nvcomm.errors import NvcommError
from nvcomm.host import transport as transports
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
    """Nothing is arranged: the own copy is late now and then.

    A wrong protocol may also lose a word, and then waits in vain before it has shown a wrong one: it begins again.
    """
    sizes = np.random.default_rng(seed).choice([16, 64, 512], 2000).tolist()
    seen = []
    while not any(seen) and len(seen) < 8:
        world = ranks(2, transport="delayed", seed=seed + len(seen), timeout_s=1.0, mutations=frozenset({"late-copy"}))
        seen.append(bad_words(world, gather, sizes))
    assert any(seen), seen


def test_pieces_arrive_out_of_order_but_in_order_at_one_address(monkeypatch, seed):
    memory = np.zeros((2, 256), np.uint32)
    deliveries: list[tuple[int, int]] = []  # address, value

    def deliver(target, words):
        deliveries.append((target.ctypes.data, int(words[0])))
        assert (target <= words).all()  # nothing older lands on something newer
        target[:] = words

    monkeypatch.setattr(transports, "store_words", deliver)
    transport = DelayedTransport(seed)
    for value in range(1, 60):
        transport.begin()  # the publish before may still be on its way to the same addresses
        for lane in (0, 1):
            transport.store(lane, memory[lane], np.full(256, value, np.uint32))
    transport.close()
    assert (memory == 59).all()
    of_one_publish = [(a, b) for (a, x), (b, y) in itertools.pairwise(deliveries) if x == y]
    assert any(a < b for a, b in of_one_publish)
    assert any(a > b for a, b in of_one_publish)


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
    memory = np.zeros(4, np.uint32)
    transport._floor[0] = time.monotonic() + 1000
    transport.store(0, memory, np.ones(4, np.uint32))
    with pytest.raises(NvcommError, match="1 stores|2 stores|3 stores|4 stores"):
        transport.drain(0.05)
    with transport._changed:  # all of it is due now
        transport._outbox[:] = [(0.0, *piece[1:]) for piece in transport._outbox]
        transport._changed.notify_all()
    transport.drain(60.0)
    transport.close()
    assert (memory == 1).all()
