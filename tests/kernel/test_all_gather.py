# SPDX-License-Identifier: Apache-2.0
"""The all-gather kernel in the virtual world: every size, alignment, payload and order of calls."""

from __future__ import annotations

import random

import pytest
import torch

import nvcomm
from nvcomm.mailbox import NUM_SLOTS
from tests.kernel.worlds import DTYPES, assert_gathered, coded, words_of

pytestmark = pytest.mark.gpu
SIZES = (1, 2, 3, 4, 15, 16, 17, 48, 511, 512, 513, 4096, 4100, 65536, 65538, 1 << 20)


@pytest.fixture(scope="module", params=["safe", "early", "off"])
def world4(request):
    with nvcomm.virtual_world(4, pdl=request.param, timeout_s=5) as world:
        yield world
        assert_clean(world)


def assert_clean(world):
    """The audit of docs/mailbox.md R3: every word EMPTY, every rank at the same slot and generation."""
    audits = [comm.audit() for comm in world]
    assert [audit.dirty_words for audit in audits] == [0] * len(world)
    assert len({(audit.slot, audit.generation) for audit in audits}) == 1


@pytest.mark.parametrize("kind", ["random", "empty", "escape", "mixed"])
def test_R5_every_payload_arrives_bit_for_bit(world4, kind):
    for seed, size in enumerate((*SIZES, *reversed(SIZES))):  # grows, then shrinks (R3)
        xs = [words_of(kind, size // 4 + 1, 100 * seed + rank).view(torch.uint8)[:size] for rank in range(4)]
        assert_gathered(world4.all_gather(xs), xs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(world4, dtype):
    xs = [words_of("random", 64, rank).view(torch.uint8) for rank in range(4)]
    xs = [x % 2 == 1 if dtype == torch.bool else x.view(dtype).reshape(2, -1) for x in xs]
    ys = world4.all_gather(xs)
    assert ys[0].shape == (4, *xs[0].shape)
    assert ys[0].dtype == dtype
    assert_gathered(ys, xs)


@pytest.mark.parametrize("size", [1, 2, 6, 30, 32, 200, 4104])
def test_no_alignment_is_needed_and_nothing_outside_is_written(world4, size):
    for offset in range(17):
        storage = [torch.full((size + 64,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(4)]
        xs = [words_of("random", size + 8, rank).view(torch.uint8)[offset : offset + size] for rank in range(4)]
        room = [torch.full((4 * size + 64,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(4)]
        ins = [s[offset : offset + size].copy_(x) for s, x in zip(storage, xs, strict=True)]
        outs = [r[16 - offset % 16 :][: 4 * size].view(4, size) for r in room]
        assert_gathered(world4.all_gather(ins, outs), xs)
        for r in room:
            start = 16 - offset % 16
            assert bool((r[:start] == 0x5A).all())
            assert bool((r[start + 4 * size :] == 0x5A).all())


def test_zero_bytes_move_nothing(world4):
    before = [comm.audit() for comm in world4]
    ys = world4.all_gather([torch.empty((0, 3), device="cuda") for _ in range(4)])
    assert ys[0].shape == (4, 0, 3)
    assert [comm.audit() for comm in world4] == before  # R12: an empty call advances nothing


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7, 8])
def test_every_world_size(world_size):
    with nvcomm.virtual_world(world_size, timeout_s=5) as world:
        for call, size in enumerate((1, 16, 100, 4096, 131072, 20)):
            xs = [coded(rank, call, size) for rank in range(world_size)]
            assert_gathered(world.all_gather(xs), xs)
        assert_clean(world)


def test_R6_the_generation_wraps():
    with nvcomm.virtual_world(3, generation=2**32 - 2, timeout_s=5) as world:
        for call in range(3 * NUM_SLOTS + 1):
            xs = [coded(rank, call, 40 + call) for rank in range(3)]
            assert_gathered(world.all_gather(xs), xs)
        assert world[0].audit().generation == (2**32 - 2 + 3 * NUM_SLOTS + 1) % 2**32
        assert world[0].stats().calls == 3 * NUM_SLOTS + 1
        assert_clean(world)


def test_R6_graphs_of_different_sizes_replay_in_any_order(world4):
    sizes = [(4, 4096, 64), (1024, 4, 5), (16384, 16380, 1), (3, 2, 1)]
    counter = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(4)]
    graphs, outs, ins = [], [], []
    for trio in sizes:
        ins.append([[torch.zeros(size, dtype=torch.int32, device="cuda") for size in trio] for _ in range(4)])
        outs.append([[torch.zeros((4, size), dtype=torch.int32, device="cuda") for size in trio] for _ in range(4)])
        graphs.append([])
        for rank, comm in enumerate(world4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
                for i, size in enumerate(trio):
                    counter[rank].add_(1)
                    ins[-1][rank][i].copy_(torch.arange(size, dtype=torch.int32, device="cuda").add_(counter[rank]))
                    ins[-1][rank][i].add_(rank << 24)
                    comm.all_gather(ins[-1][rank][i], outs[-1][rank][i])
            graphs[-1].append(graph)
    order, replay = random.Random(1), 0
    before = world4[0].audit()
    for _ in range(50):
        which = order.randrange(len(sizes))
        torch.cuda.synchronize()
        for rank, comm in enumerate(world4):
            with torch.cuda.stream(comm.stream):
                graphs[which][rank].replay()
        torch.cuda.synchronize()
        for i, size in enumerate(sizes[which]):
            replay += 1
            want = [torch.arange(size, device="cuda") + replay + (rank << 24) for rank in range(4)]
            assert_gathered([outs[which][rank][i] for rank in range(4)], [w.to(torch.int32) for w in want])
        for after in (comm.audit() for comm in world4):  # three calls: a frozen slot would be the same every time
            assert after.slot == (before.slot + replay) % NUM_SLOTS
            assert after.generation == (before.generation + replay) % 2**32


def test_one_group_call_is_captured_into_one_graph(world4):
    xs = [coded(rank, 7, 100) for rank in range(4)]
    outs = [torch.zeros((4, 100), dtype=torch.int32, device="cuda") for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        world4.all_gather(xs, outs)
    for call in range(5):
        for rank, x in enumerate(xs):
            x.copy_(coded(rank, call, 100))
        graph.replay()
        assert_gathered(outs, xs)


def test_R7_an_eager_call_from_another_stream_runs_behind_the_last_one(world4):
    def delayed(comm):
        torch.cuda._sleep(2_000_000)
        comm.all_gather(xs[comm.rank], first[comm.rank])
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            comm.all_gather(xs[comm.rank], second[comm.rank])
        torch.cuda.current_stream().wait_stream(other)

    xs = [coded(rank, 1, 5000) for rank in range(4)]
    first = [torch.zeros((4, 5000), dtype=torch.int32, device="cuda") for _ in range(4)]
    second = [torch.zeros_like(y) for y in first]
    for _ in range(5):
        world4.run(delayed)
        torch.cuda.synchronize()
        assert_gathered(first, xs)
        assert_gathered(second, xs)


def test_one_rank_late_at_every_call(world4):
    for call in range(24):
        xs = [coded(rank, call, 1 + 37 * call) for rank in range(4)]
        outs = [torch.zeros((4, 1 + 37 * call), dtype=torch.int32, device="cuda") for _ in range(4)]

        def one_late(comm, late=call % 4, xs=xs, outs=outs):
            if comm.rank == late:
                torch.cuda._sleep(400_000)
            comm.all_gather(xs[comm.rank], outs[comm.rank])

        world4.run(one_late)
        assert_gathered(outs, xs)


def test_stats_count_calls_bytes_escapes_and_long_waits():
    with nvcomm.virtual_world(2, timeout_s=5) as world:
        xs = [words_of("empty", 8, rank) for rank in range(2)]
        world.all_gather(xs)

        def late(comm):
            if comm.rank == 1:
                torch.cuda._sleep(20_000_000)
            comm.all_gather(xs[comm.rank])

        world.run(late)
        stats = world[0].stats()
        assert (stats.calls, stats.bytes, stats.escapes) == (2, 64, 4)
        assert stats.longest_wait_us[1] > 1000
        assert world[1].stats().longest_wait_us[1] == 0


def test_late_copy_shows_stale_words():
    """The negative control of R2 and R3 together: the same calls, on the protocol that is known to be wrong."""
    wrong = 0
    with nvcomm.virtual_world(4, protocol="late-copy", timeout_s=1) as world:
        try:
            for call in range(60):
                size = (16, 4, 4, 4, 1024, 8)[call % 6] * 4
                xs = [coded(rank, call, size) for rank in range(4)]
                outs = [torch.zeros((4, size), dtype=torch.int32, device="cuda") for _ in range(4)]

                def one_late(comm, late=call % 4, xs=xs, outs=outs):
                    if comm.rank == late:
                        torch.cuda._sleep(200_000)
                    comm.all_gather(xs[comm.rank], outs[comm.rank])

                world.run(one_late)
                want = torch.stack(xs)
                wrong += sum(int((out != want).sum()) for out in outs)
        except nvcomm.PeerTimeoutError:
            wrong += 1
    assert wrong > 0
