# SPDX-License-Identifier: Apache-2.0
"""The host all-gather hands out every rank's bytes, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvcomm.errors import UsageError
from nvcomm.mailbox import EMPTY, ESCAPE, NUM_SLOTS

SIZES = [0, 1, 3, 16, 17, 512, 4096, 65536]
DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.int32]


def payload(rank: int, call: int, size: int) -> torch.Tensor:
    """Bytes that name their rank, call and place."""
    index = torch.arange(size, dtype=torch.int64)
    return ((index * 7 + rank * 31 + call * 101 + (index >> 8)) % 256).to(torch.uint8)


def wanted(world_size: int, call: int, size: int) -> torch.Tensor:
    return torch.stack([payload(rank, call, size) for rank in range(world_size)])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_every_size_in_turn_growing_and_shrinking(ranks, gather, world_size):
    sizes = SIZES + SIZES[::-1] + [65536, 1, 4096, 3] if world_size < 8 else [0, 1, 17, 4096, 65536, 16, 3]

    def work(engine):
        for call, size in enumerate(sizes):
            out = gather(engine, payload(engine.rank, call, size))
            assert torch.equal(out, wanted(world_size, call, size)), (call, size)

    ranks(world_size).run_clean(work)


def test_four_mebibytes(ranks, gather):
    size = 4 << 20

    def work(engine):
        for call in range(2):
            assert torch.equal(gather(engine, payload(engine.rank, call, size)), wanted(2, call, size))

    ranks(2, max_bytes=size).run_clean(work)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_any_bits(ranks, dtype, seed):
    def values(rank: int) -> torch.Tensor:
        numbers = np.random.default_rng(seed + rank)
        width = dtype.itemsize
        bits = numbers.integers(0, 2 if dtype == torch.bool else 256, (3, 5 * width), np.uint8)
        return torch.from_numpy(bits).view(dtype)

    def work(engine):
        x = values(engine.rank)
        out = torch.empty((3, *x.shape), dtype=dtype)
        engine.all_gather(x, out)
        expected = torch.stack([values(rank) for rank in range(3)])
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))

    ranks(3).run_clean(work)


def test_misaligned_storage_and_nothing_written_outside(ranks):
    def work(engine):
        for size in (1, 3, 16, 33, 100):
            for offset in (1, 2, 3, 5):
                whole = payload(engine.rank, 0, size + offset)
                held = torch.full((2 * size + 2 * offset,), 0xEE, dtype=torch.uint8)
                engine.all_gather(whole[offset:], held[offset : offset + 2 * size])
                assert torch.equal(
                    held[offset : offset + 2 * size], wanted(2, 0, size + offset)[:, offset:].reshape(-1)
                )
                assert (held[:offset] == 0xEE).all()
                assert (held[offset + 2 * size :] == 0xEE).all()

    ranks(2).run_clean(work)


def test_scalars_shapes_and_no_elements(ranks):
    def work(engine):
        for shape in ((), (1,), (2, 3, 4), (4, 0)):
            x = torch.full(shape, engine.rank + 1.5)
            out = torch.empty((2, *shape))
            engine.all_gather(x, out)
            assert torch.equal(out, torch.stack([torch.full(shape, 1.5), torch.full(shape, 2.5)]))

    ranks(2).run_clean(work)


@pytest.mark.parametrize("kind", ["only EMPTY", "only ESCAPE", "both", "rare", "random"])
def test_R5_reserved_words_are_restored(ranks, gather, kind, seed):
    sizes = [16, 512, 513, 4096, 65536, 20]

    def words(rank: int, call: int, size: int) -> torch.Tensor:
        numbers = np.random.default_rng([seed, rank, call])
        count = -(-size // 4)
        random = numbers.integers(0, 1 << 32, count, np.uint32)
        reserved = numbers.choice(np.array([EMPTY, ESCAPE], np.uint32), count)
        odds = {"rare": 0.01, "both": 1.0, "random": 0.5}.get(kind, 1.0)
        if kind.startswith("only"):
            reserved[:] = EMPTY if kind == "only EMPTY" else ESCAPE
        chosen = np.where(numbers.random(count) < odds, reserved, random)
        return torch.from_numpy(chosen.view(np.uint8)[:size].copy())

    def work(engine):
        for call, size in enumerate(sizes):
            out = gather(engine, words(engine.rank, call, size))
            assert torch.equal(out, torch.stack([words(rank, call, size) for rank in range(3)])), size
        return engine.stats().escapes

    assert all(escapes > 0 for escapes in ranks(3).run_clean(work))


def test_R6_more_generations_than_slots_and_a_wrapping_count(ranks, gather):
    start = (1 << 32) - 2
    calls = 3 * NUM_SLOTS + 1

    def work(engine):
        places = []
        for call in range(calls):
            places.append((engine.generation, engine.slot))
            size = 64 + 16 * (call % 3)
            assert torch.equal(gather(engine, payload(engine.rank, call, size)), wanted(2, call, size))
        return places

    expected = [((start + call) % (1 << 32), call % NUM_SLOTS) for call in range(calls)]
    assert ranks(2, generation=start).run_clean(work) == [expected, expected]


@pytest.mark.parametrize("late_rank", [0, 2])
def test_one_late_rank(ranks, gather, late_rank):
    import time

    def work(engine):
        for call in range(4):
            if engine.rank == late_rank:
                time.sleep(0.1)
            assert torch.equal(gather(engine, payload(engine.rank, call, 100)), wanted(3, call, 100))
        return engine.stats()

    for rank, stats in enumerate(ranks(3).run_clean(work)):
        assert stats.calls == 4
        assert stats.bytes == 400
        if rank != late_rank:
            assert stats.longest_wait_us[late_rank] > 10_000


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_sent(ranks):
    world = ranks(1, max_bytes=64)
    engine = world.engines[0]
    good = torch.zeros(16)
    cases = [
        (torch.zeros(17), torch.empty(17)),
        (good, torch.empty(15)),
        (torch.zeros(4, 4).t(), torch.empty(16)),
        (good, torch.empty(16, device="meta")),
        (torch.zeros(4, dtype=torch.complex64).conj(), torch.empty(4, dtype=torch.complex64)),
    ]
    for x, out in cases:
        with pytest.raises(UsageError):
            engine.all_gather(x, out)
    assert engine.generation == 0
    world.assert_audit()
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.all_gather(good, torch.empty(16))
