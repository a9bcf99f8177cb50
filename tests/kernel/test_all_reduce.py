# SPDX-License-Identifier: Apache-2.0
"""All-reduce and reduce-scatter in the virtual world: the bits of the reference, whatever the protocol and the size."""

from __future__ import annotations

import itertools

import pytest
import torch

import nvcomm
from nvcomm.errors import CollectiveMismatchError, PeerTimeoutError, UsageError
from nvcomm.mailbox import EMPTY, ESCAPE, NUM_SLOTS
from nvcomm.reference import collectives as reference
from tests.kernel.test_all_gather import assert_clean
from tests.kernel.worlds import assert_gathered, words_of
from tests.mhc_cases import stepped

pytestmark = pytest.mark.gpu
HIDDEN = 5120
ROWS = (1, 6, 48, 3, 192, 7, 384, 1, 96, 2)  # growing and shrinking in one mailbox
PROTOCOLS = ("ll", "two_shot")
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module", params=["safe", "early", "off"])
def world4(request):
    with nvcomm.virtual_world(4, pdl=request.param, timeout_s=5) as world:
        for op, dtype in itertools.product(("all_reduce", "reduce_scatter"), reference.DTYPES):
            world.prepare(op, dtype)
        yield world
        assert_clean(world)


def inputs(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Values of such different sizes that FP32 sums of them are inexact, so that another order of addition shows."""
    spread = 12 if dtype == torch.float16 else 16  # of smaller ones four BF16 numbers add up exactly, in any order
    generator = torch.Generator(device="cuda").manual_seed(seed)
    options = {"device": "cuda", "generator": generator}
    return [
        (torch.randn(shape, **options) * 2.0 ** torch.randint(-spread, spread + 1, shape, **options)).to(dtype)
        for _ in range(world_size)
    ]


def assert_same(ys: list[torch.Tensor], want: torch.Tensor) -> None:
    """Every rank has the reference's bits; NaN compares as NaN, but not between ranks."""
    bits = BITS[want.element_size()]
    for rank, y in enumerate(ys):
        wrong = ~((y.view(bits) == want.view(bits)) | (y.isnan() & want.isnan()))
        assert not wrong.any(), (
            f"rank {rank}: {int(wrong.sum())} of {want.numel()} wrong, {wrong.nonzero()[0].tolist()}"
        )
        assert torch.equal(y.view(bits), ys[0].view(bits)), f"rank {rank} differs from rank 0"


@pytest.mark.parametrize("order", ["ll", "two_shot", "both", "mixed"])
def test_R13_rows_growing_and_shrinking_in_one_mailbox(world4, order):
    """LL only, two-shot only, both in turn, and all mixed with all-gathers and reduce-scatters."""
    for call, rows in enumerate(ROWS):
        xs = inputs(4, (rows, HIDDEN), torch.bfloat16, call)
        want = reference.all_reduce(xs)
        for protocol in PROTOCOLS if order in ("both", "mixed") else (order,):
            assert_same(world4.all_reduce(xs, protocol=protocol), want)
        if order == "mixed":
            assert_gathered(world4.all_gather(xs), xs)
            for part, wanted in zip(world4.reduce_scatter(xs), reference.reduce_scatter(xs), strict=True):
                assert_same([part], wanted)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 31, 128, 1000, 4097])
def test_any_size_and_alignment_and_nothing_outside_is_written(world4, dtype, size):
    for offset, protocol in itertools.product((0, 1, 3), PROTOCOLS):
        xs = [x[offset:] for x in inputs(4, (size + offset,), dtype, size)]
        room = [torch.full((size + 64,), 77.0, dtype=dtype, device="cuda") for _ in range(4)]
        outs = [r[16 - offset :][:size] for r in room]
        assert_same(world4.all_reduce(xs, outs, protocol=protocol), reference.all_reduce(xs))
        for r in room:
            assert bool((r[: 16 - offset] == 77.0).all())
            assert bool((r[16 - offset + size :] == 77.0).all())


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_R5_special_values_at_every_position(world4, dtype):
    """-0.0, infinities, subnormals and NaNs, those with the bits of reserved words too; no value hangs or is lost."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, -info.max, info.tiny * info.eps, -info.tiny / 2]
    special = torch.tensor(values, dtype=torch.float64).to(dtype).cuda()
    for shift in range(len(values)):
        plain = special.roll(shift).repeat(37)
        for others in (torch.zeros_like(plain), torch.full_like(plain, -0.0), plain.roll(1)):
            xs = [plain, others, others, plain.flip(0)]
            for protocol in PROTOCOLS:
                assert_same(world4.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
    for kind, protocol in itertools.product(("empty", "escape", "mixed", "random"), PROTOCOLS):
        xs = [words_of(kind, 515, rank).view(dtype) for rank in range(4)]
        assert_same(world4.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
        rows = [x.view(5, -1) for x in xs]
        for part, wanted in zip(world4.reduce_scatter(rows), reference.reduce_scatter(rows), strict=True):
            assert_same([part], wanted)


@pytest.mark.parametrize("word", [EMPTY, ESCAPE])
def test_R5_a_result_that_equals_a_reserved_word_travels_as_another_nan(world4, word):
    """What an owner publishes may be reserved although no contribution was: of one rank's NaN and zeros elsewhere."""
    reserved = torch.full((4096,), word - 2**32, dtype=torch.int32, device="cuda").view(torch.float32)
    xs = [reserved, *(torch.zeros_like(reserved) for _ in range(3))]
    ys = world4.all_reduce(xs, protocol="two_shot")
    assert all(bool(y.isnan().all()) for y in ys)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 48, 190])
@pytest.mark.parametrize("width", [1, 3, 64, 5120])
def test_R12_reduce_scatter_of_any_split(world4, rows, width):
    """Fewer rows than ranks too: who owns nothing waits for everybody all the same."""
    xs = inputs(4, (rows, width), torch.bfloat16, rows * width)
    for part, wanted in zip(world4.reduce_scatter(xs), reference.reduce_scatter(xs), strict=True):
        assert_same([part], wanted)


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "scatter"])
def test_R12_a_fast_rank_does_not_lap_a_slow_one(world4, protocol):
    """With one chunk, three of four ranks own nothing: late ranks and short calls are where a lap would show."""
    for call in range(6 * NUM_SLOTS):
        xs = inputs(4, (1, 8 + call % 3), torch.bfloat16, call)
        outs = [torch.empty_like(x) for x in xs]
        parts = [torch.empty_like(x[:1] if rank == 0 else x[:0]) for rank, x in enumerate(xs)]

        def one_late(comm, late=call % 4, xs=xs, outs=outs, parts=parts):
            if comm.rank == late:
                torch.cuda._sleep(400_000)
            if protocol == "scatter":
                comm.reduce_scatter(xs[comm.rank], parts[comm.rank])
            else:
                comm.all_reduce(xs[comm.rank], outs[comm.rank], protocol=protocol)

        world4.run(one_late)
        want = reference.all_reduce(xs)
        assert_same(parts[:1] if protocol == "scatter" else outs, want)


def test_R6_graphs_replayed_with_changed_inputs(world4):
    """500 replays of a graph of both protocols, a gather and a reduce-scatter, checked on the device."""
    rows = 6
    xs = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    counter = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(4)]
    bad = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(4)]
    index = torch.arange(rows * HIDDEN, device="cuda").view(rows, HIDDEN)

    graphs, kept = [], []  # a graph does not keep what its kernels write to
    for rank, comm in enumerate(world4):
        outs = [torch.zeros_like(xs[0]) for _ in range(2)]
        gathered = torch.zeros((4, rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
        part = torch.zeros((2 if rank < 2 else 1, HIDDEN), dtype=torch.bfloat16, device="cuda")
        kept.append((outs, gathered, part))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
            counter[rank].add_(1)
            xs[rank].copy_(stepped(index, rank, counter[rank]))
            comm.all_reduce(xs[rank], outs[0], protocol="ll")
            comm.all_gather(xs[rank], gathered)
            comm.all_reduce(xs[rank], outs[1], protocol="two_shot")
            comm.reduce_scatter(xs[rank], part)
            want = sum(stepped(index, r, counter[rank]).float() for r in range(4)).bfloat16()
            for out in outs:
                bad[rank].add_((out != want).sum())
            bad[rank].add_((gathered.float().sum(0).bfloat16() != want).sum())
            start = (0, 2, 4, 5)[rank]
            bad[rank].add_((part != want[start : start + len(part)]).sum())
        graphs.append(graph)
    for _ in range(500):
        for rank, comm in enumerate(world4):
            with torch.cuda.stream(comm.stream):
                graphs[rank].replay()
    torch.cuda.synchronize()
    assert [int(count) for count in bad] == [0] * 4
    assert [int(count) for count in counter] == [500] * 4
    for comm in world4:
        comm.check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7, 8])
def test_R13_every_world_size(world_size):
    with nvcomm.virtual_world(world_size, timeout_s=5, max_bytes=1 << 16) as world:
        for call, size in enumerate((1, 16, 100, 4096, 32768, 20)):
            xs = inputs(world_size, (size,), torch.bfloat16, call)
            for protocol in PROTOCOLS:
                assert_same(world.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
            rows = [x.view(-1, 1) for x in xs]
            for part, wanted in zip(world.reduce_scatter(rows), reference.reduce_scatter(rows), strict=True):
                assert_same([part], wanted)
        assert_clean(world)


def test_R6_the_generation_wraps():
    with nvcomm.virtual_world(3, generation=2**32 - 2, timeout_s=5, max_bytes=1 << 16) as world:
        for call in range(3 * NUM_SLOTS + 1):
            xs = inputs(3, (40 + call,), torch.bfloat16, call)
            assert_same(world.all_reduce(xs, protocol=PROTOCOLS[call % 2]), reference.all_reduce(xs))
        assert world[0].audit().generation == (2**32 - 2 + 3 * NUM_SLOTS + 1) % 2**32
        assert_clean(world)


def test_no_elements_move_nothing(world4):
    before = [comm.audit() for comm in world4]
    empty = [torch.empty((0, 5), device="cuda") for _ in range(4)]
    assert world4.all_reduce(empty)[0].shape == (0, 5)
    assert world4.reduce_scatter(empty)[3].shape == (0, 5)
    assert [comm.audit() for comm in world4] == before  # R12: an empty call advances nothing


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_R10_a_rank_that_does_not_come_is_named_and_the_world_comes_back(protocol):
    with nvcomm.virtual_world(3, timeout_s=0.2, max_bytes=1 << 16) as world:
        world.prepare("all_reduce", torch.bfloat16)
        xs = inputs(3, (3000,), torch.bfloat16, 1)
        outs = [torch.zeros_like(x) for x in xs]

        def all_but_one(comm):
            if comm.rank != 1:
                comm.all_reduce(xs[comm.rank], outs[comm.rank], protocol=protocol)

        world.run(all_but_one)
        torch.cuda.synchronize()
        for rank in (0, 2):
            with pytest.raises(PeerTimeoutError) as raised:
                world[rank].check()
            assert raised.value.src_rank == 1
            assert outs[rank].isnan().any()
        world.reset()
        assert_same(world.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))


def test_R11_a_different_call_is_an_error_that_names_both(monkeypatch):
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    with nvcomm.virtual_world(2, timeout_s=1.0, max_bytes=1 << 16) as world:
        world.prepare("all_reduce", torch.bfloat16)
        xs = inputs(2, (3000,), torch.bfloat16, 1)
        for protocol in PROTOCOLS:
            assert_same(world.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
        outs = [torch.empty_like(x) for x in xs]
        world.run(lambda comm: comm.all_reduce(xs[comm.rank], outs[comm.rank], protocol=PROTOCOLS[comm.rank]))
        torch.cuda.synchronize()
        with pytest.raises(CollectiveMismatchError, match="two_shot"):
            world[0].check()


@pytest.mark.slow
def test_late_and_reordered_delivery_changes_nothing():
    """The delayed transport: every word on its own, late and in any order."""
    with nvcomm.virtual_world(4, timeout_s=20, max_bytes=1 << 17, transport="delayed") as world:
        for op in ("all_reduce", "reduce_scatter"):
            world.prepare(op, torch.bfloat16)
        for call, rows in enumerate((1, 3, 12, 2, 7, 1, 12, 5)):
            xs = inputs(4, (rows, HIDDEN), torch.bfloat16, call)
            for protocol in PROTOCOLS:
                assert_same(world.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
            for part, wanted in zip(world.reduce_scatter(xs), reference.reduce_scatter(xs), strict=True):
                assert_same([part], wanted)
        assert_clean(world)


def test_R9_kernels_are_loaded_before_a_rank_of_a_virtual_world_calls():
    with nvcomm.virtual_world(2, timeout_s=5, max_bytes=1 << 16) as world:
        x = torch.zeros(8, device="cuda")
        with pytest.raises(UsageError, match="prepare"):
            world[0].all_reduce(x)
        with pytest.raises(UsageError, match="float64"):
            world.prepare("all_reduce", torch.float64)
