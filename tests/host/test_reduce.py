# SPDX-License-Identifier: Apache-2.0
"""Host reductions: the bits of the reference, on every rank and for every protocol (R13), beside gathers."""

from __future__ import annotations

import threading

import pytest
import torch

from nvcomm.errors import CollectiveMismatchError, PeerTimeoutError, UsageError
from nvcomm.host.all_reduce import AUTO_LL_BYTES, choose
from nvcomm.host.reduce import part
from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference
from tests.host.conftest import LATE_S

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Values of very different sizes, so that another order of addition shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = [torch.randint(-6, 7, shape, generator=generator) for _ in range(world_size)]
    return [(torch.randn(shape, generator=generator) * 2.0**exponent).to(dtype) for exponent in exponents]


def same(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bit by bit, but that a NaN is a NaN."""
    bits = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    nan = wanted.isnan()
    return torch.equal(seen.isnan(), nan) and torch.equal(seen.view(bits)[~nan], wanted.view(bits)[~nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_R13_all_reduce_is_the_reference_for_both_protocols(ranks, world_size, dtype, seed):
    shapes = [(1,), (3,), (5, 7), (64,), (33, 96), (2, 5), (129,)]

    def work(engine):
        bits = []
        for call, shape in enumerate(shapes):
            xs = inputs(world_size, shape, dtype, seed + call)
            for protocol in ("ll", "two_shot"):
                out = torch.full(shape, 7.0, dtype=dtype)
                engine.all_reduce(xs[engine.rank], out, protocol)
                assert same(out, reference.all_reduce(xs)), (shape, protocol)
                bits.append(out.view(torch.uint8).tolist())
        return bits

    results = ranks(world_size).run_clean(work)
    assert all(result == results[0] for result in results)


def test_R13_another_order_of_addition_would_be_seen(seed):
    xs = inputs(5, (1000,), torch.float32, seed)
    in_a_row = xs[0] + xs[1] + xs[2] + xs[3] + xs[4]
    assert not torch.equal(in_a_row, reference.all_reduce(xs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_reduce_scatter_is_a_part_of_all_reduce(ranks, world_size, dtype, seed):
    """More rows than ranks, fewer, none in some; rows of odd sizes, so that parts share a chunk."""
    shapes = [(world_size, 8), (7, 3), (1, 5), (world_size - 1, 1), (16, 1), (40, 33), (2, 2)]

    def work(engine):
        for call, shape in enumerate(shapes):
            xs = inputs(world_size, shape, dtype, seed + call)
            wanted = reference.reduce_scatter(xs)[engine.rank]
            out = torch.full_like(wanted, 7.0)
            engine.reduce_scatter(xs[engine.rank], out)
            assert same(out, wanted), shape

    ranks(world_size).run_clean(work)


@pytest.mark.parametrize("protocol", ["ll", "two_shot", "scatter"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_at_every_position(ranks, dtype, protocol):
    """-0.0, denormals, infinities and NaNs, those with the bits of reserved words too.

    A signalling NaN is quietened by an addition: only then, in an owner's result, it has a reserved word's bits.
    """
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    quiet = {torch.bfloat16: 0x00400040, torch.float16: 0x02000200, torch.float32: 0x00400000}[dtype]
    words = [EMPTY, ESCAPE, EMPTY - quiet, ESCAPE - quiet]
    reserved = torch.tensor([word - 2**32 for word in words], dtype=torch.int32).view(torch.uint8).view(dtype)
    values = torch.cat(
        [
            torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype),
            torch.tensor([1, -(2 ** (8 * dtype.itemsize - 1)) + 1], dtype=bits).view(dtype),  # smallest denormals
            reserved,
        ]
    )
    size = 19

    def work(engine):
        for value in values:
            for place in range(0, size - 1, 3):
                xs = [torch.full((size,), -0.0).to(dtype) for _ in range(2)]
                xs[1][place : place + 2] = value
                wanted = reference.all_reduce(xs)
                out = torch.zeros(size, dtype=dtype)
                if protocol == "scatter":
                    wanted = reference.reduce_scatter(xs)[engine.rank]
                    out = torch.zeros_like(wanted)
                    engine.reduce_scatter(xs[engine.rank], out)
                else:
                    engine.all_reduce(xs[engine.rank], out, protocol)
                assert same(out, wanted), (value, place)

    ranks(2).run_clean(work)


@pytest.mark.parametrize("transport", ["direct", "delayed"])
def test_all_operations_share_one_mailbox(ranks, gather, transport, seed):
    world_size = 3

    def work(engine):
        for call in range(40):
            rows = 1 + (call * 7) % 23
            xs = inputs(world_size, (rows, 16), torch.bfloat16, seed + call)
            x = xs[engine.rank]
            kind = call % 4
            if kind == 3:
                assert torch.equal(gather(engine, x), torch.stack([one.view(torch.uint8).reshape(-1) for one in xs]))
            elif kind == 2:
                wanted = reference.reduce_scatter(xs)[engine.rank]
                out = torch.empty_like(wanted)
                engine.reduce_scatter(x, out)
                assert same(out, wanted)
            else:
                out = torch.empty_like(x)
                engine.all_reduce(x, out, ("ll", "two_shot")[kind])
                assert same(out, reference.all_reduce(xs))

    ranks(world_size, transport=transport, seed=seed, device_checks=call_checks(transport)).run_clean(work)


def call_checks(transport: str) -> int:
    """Checks on in one of the two runs."""
    return int(transport == "delayed")


@pytest.mark.parametrize("rows", [1, 2])
def test_R12_a_rank_that_owns_no_row_still_waits_for_everybody(ranks, rows):
    """Rank 2 gets a token from each; without it, it would be done before rank 0 has begun, which waits for that."""
    world = ranks(3)
    rank_2_ended = threading.Event()

    def work(engine):
        x = torch.ones((rows, 4))
        out = torch.empty((int(engine.rank < rows), 4))
        ended_before = rank_2_ended.wait(1.0) if engine.rank == 0 else None
        engine.reduce_scatter(x, out)
        if engine.rank == 2:
            rank_2_ended.set()
        return ended_before

    assert world.run_clean(work) == [False, None, None]


@pytest.mark.parametrize("operation", ["ll", "two_shot", "scatter"])
def test_nothing_to_sum_touches_nothing(ranks, operation):
    def work(engine):
        x = torch.empty((0, 4))
        if operation == "scatter":
            engine.reduce_scatter(x, torch.empty((0, 4)))
        else:
            engine.all_reduce(x, torch.empty((0, 4)), operation)
        return engine.generation

    assert ranks(2).run_clean(work) == [0, 0]
    assert ranks(2, device_checks=1).run_clean(work) == [1, 1]  # the headers were exchanged


@pytest.mark.parametrize("operation", ["ll", "two_shot", "scatter"])
def test_a_missing_rank_is_named_and_the_output_is_nan(ranks, operation):
    world = ranks(3)
    world.hurry(0.3)
    world.meet_before_waiting(0, 2)

    def work(engine):
        if engine.rank == 1:
            return None
        x = torch.ones((3, 16))
        out = torch.zeros((1 if operation == "scatter" else 3, 16))
        with pytest.raises(PeerTimeoutError) as caught:  # noqa: PT012
            if operation == "scatter":
                engine.reduce_scatter(x, out)
            else:
                engine.all_reduce(x, out, operation)
        assert out.isnan().all()
        return caught.value.root_rank

    assert world.run(work) == [1, None, 1]
    world.hurry(LATE_S)
    assert world.run(lambda engine: engine.reset()) == [None] * 3
    out = [torch.empty(4) for _ in range(3)]
    world.run_clean(lambda engine: engine.all_reduce(torch.ones(4), out[engine.rank]))
    assert all((one == 3).all() for one in out)


def test_R11_protocols_that_differ_are_named(ranks):
    world = ranks(2, device_checks=1)

    def work(engine):
        out = torch.zeros(4)
        with pytest.raises(
            CollectiveMismatchError, match="rank 0 calls all_reduce ll.*rank 1 calls all_reduce two_shot"
        ):
            engine.all_reduce(torch.ones(4), out, ("ll", "two_shot")[engine.rank])
        assert out.isnan().all()

    assert world.run(work) == [None, None]


def test_arguments_that_do_not_fit(ranks):
    engine = ranks(1).engines[0]
    x = torch.ones(4)
    for bad in (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(UsageError):
            engine.all_reduce(bad, bad.clone())
    with pytest.raises(UsageError):
        engine.all_reduce(x, torch.empty(4, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="two_shot"):
        engine.all_reduce(x, torch.empty(4), "ring")
    with pytest.raises(UsageError, match="scalar"):
        engine.reduce_scatter(torch.tensor(1.0), torch.empty(1))
    assert engine.generation == 0


def test_parts_and_choice():
    assert [part(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [part(1, rank, 3) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert choose("auto", AUTO_LL_BYTES, 8) == "ll"
    assert choose("auto", AUTO_LL_BYTES + 1, 8) == "two_shot"
    assert choose("auto", 1 << 22, 2) == "ll"
    assert choose("two_shot", 16, 2) == "two_shot"
