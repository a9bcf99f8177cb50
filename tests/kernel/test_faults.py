# SPDX-License-Identifier: Apache-2.0
"""A rank that does not come: every wait ends, every survivor knows, and reset brings all back (R10)."""

from __future__ import annotations

import time

import pytest
import torch

import nvcomm
from tests.kernel.worlds import assert_gathered, coded

pytestmark = pytest.mark.gpu
TIMEOUT_S = 0.3


def gather_all_but(world, absent, xs, outs):
    world.run(lambda comm: None if comm.rank == absent else comm.all_gather(xs[comm.rank], outs[comm.rank]))
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_R10_a_rank_that_never_arrives_is_named_in_time(size):
    with nvcomm.virtual_world(4, timeout_s=TIMEOUT_S) as world:
        xs = [coded(rank, 1, size) for rank in range(4)]
        outs = [torch.zeros((4, size), dtype=torch.int32, device="cuda") for _ in range(4)]
        for _ in range(3):
            world.all_gather(xs, outs)
        start = time.perf_counter()
        gather_all_but(world, 2, xs, outs)
        assert time.perf_counter() - start < TIMEOUT_S + 1
        for rank in (0, 1, 3):
            with pytest.raises(nvcomm.PeerTimeoutError) as caught:
                world[rank].check()
            error = caught.value
            assert (error.rank, error.src_rank, error.root_rank) == (rank, 2, 2)
            assert (error.generation, error.slot) == (3, 1)
            assert TIMEOUT_S * 0.9 < error.waited_s < TIMEOUT_S + 1
            assert bool((outs[rank][2] == -1).all())  # what did not arrive is 0xFF bytes
            assert torch.equal(outs[rank][0], xs[0])  # what did arrive is right
            with pytest.raises(nvcomm.PeerTimeoutError):
                world[rank].all_gather(xs[rank], outs[rank])
        world[2].check()
        assert torch.ones(3, device="cuda").sum().item() == 3  # the context is usable
        world.reset()
        for call in range(20):
            xs = [coded(rank, call, 1000 + call) for rank in range(4)]
            assert_gathered(world.all_gather(xs), xs)
        assert {comm.audit().dirty_words for comm in world} == {0}


def test_R10_a_graph_on_a_broken_communicator_fills_and_touches_nothing():
    with nvcomm.virtual_world(2, timeout_s=TIMEOUT_S) as world:
        xs = [coded(rank, 1, 64) for rank in range(2)]
        outs = [torch.zeros((2, 64), dtype=torch.int32, device="cuda") for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=world.stream(0), capture_error_mode="thread_local"):
            world[0].all_gather(xs[0], outs[0])
        graph.replay()  # rank 1 does not come
        torch.cuda.synchronize()
        with pytest.raises(nvcomm.PeerTimeoutError):
            world[0].check()
        before = [comm.audit() for comm in world]
        outs[0].zero_()
        start = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        assert time.perf_counter() - start < TIMEOUT_S  # none of them waited
        assert bool((outs[0] == -1).all())
        assert [comm.audit() for comm in world] == before


def test_R10_the_root_is_found_behind_a_rank_that_waits_itself():
    with nvcomm.virtual_world(3, timeout_s=TIMEOUT_S) as world:
        xs = [coded(rank, 1, 64) for rank in range(3)]
        outs = [torch.zeros((3, 64), dtype=torch.int32, device="cuda") for _ in range(3)]
        gather_all_but(world, 2, xs, outs)
        for rank in (0, 1):
            with pytest.raises(nvcomm.PeerTimeoutError, match="rank 2") as caught:
                world[rank].check()
            assert caught.value.root_rank == 2


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    with nvcomm.virtual_world(3, timeout_s=TIMEOUT_S) as world:
        yield world


def test_R11_with_checks_equal_calls_pass(checked):
    for call in range(7):
        xs = [coded(rank, call, 100 * call + 1) for rank in range(3)]
        assert_gathered(checked.all_gather(xs), xs)
    assert {comm.audit().dirty_words for comm in checked} == {0}


@pytest.mark.parametrize(
    ("odd", "seen"),
    [
        (torch.zeros(200, dtype=torch.int32), "800 bytes of int32"),
        (torch.zeros(100, dtype=torch.float32), "400 bytes of float32"),
        (torch.zeros(1, dtype=torch.uint8), "1 bytes of uint8"),
    ],
)
def test_R11_a_rank_that_calls_something_else_is_named(checked, odd, seen):
    xs = [coded(rank, 1, 100) for rank in range(2)] + [odd.cuda()]
    outs = [x.new_zeros((3, *x.shape)) for x in xs]
    checked.run(lambda comm: comm.all_gather(xs[comm.rank], outs[comm.rank]))
    torch.cuda.synchronize()
    for rank in (0, 1):
        with pytest.raises(nvcomm.CollectiveMismatchError) as caught:
            checked[rank].check()
        assert seen in str(caught.value)
        assert "400 bytes of int32" in str(caught.value)
    checked.reset()
    xs = [coded(rank, 2, 100) for rank in range(3)]
    assert_gathered(checked.all_gather(xs), xs)


def test_R11_the_callers_tag_is_compared_in_a_graph_too(checked):
    xs = [coded(rank, 1, 100) for rank in range(3)]
    outs = [x.new_zeros((3, 100)) for x in xs]
    for tag, names in ((7, ()), (8, ("tag 7", "tag 8"))):
        checked[0].tag, checked[1].tag, checked[2].tag = 7, 7, tag
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            checked.all_gather(xs, outs)
        graph.replay()
        torch.cuda.synchronize()
        if not names:
            assert_gathered(outs, xs)
            continue
        with pytest.raises(nvcomm.CollectiveMismatchError) as caught:
            checked[0].check()
        assert all(name in str(caught.value) for name in names)
    checked.reset()


def test_R11_without_checks_another_dtype_goes_unnoticed():
    """The negative control: what docs/mailbox.md says of ranks that disagree when nobody checks."""
    with nvcomm.virtual_world(2, timeout_s=TIMEOUT_S) as world:
        xs = [torch.ones(4, dtype=torch.int32, device="cuda"), torch.ones(4, dtype=torch.float32, device="cuda")]
        world.all_gather(xs)
        torch.cuda.synchronize()
        for comm in world:
            comm.check()


def two_streams_at_once(world):
    """Rank 0's kernel of one graph waits for its peers while another graph's starts on the same communicator."""
    x, graphs = coded(0, 1, 64), []
    outs = [torch.zeros((len(world), 64), dtype=torch.int32, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for out, stream in zip(outs, streams, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream, capture_error_mode="thread_local"):
            world[0].all_gather(x, out)
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()


def test_R7_with_checks_overlapping_graphs_are_recorded(checked):
    two_streams_at_once(checked)
    with pytest.raises(nvcomm.CollectiveMismatchError, match="overlapped"):
        checked[0].check()
    checked.reset()
    xs = [coded(rank, 2, 100) for rank in range(3)]
    assert_gathered(checked.all_gather(xs), xs)


def test_R7_without_checks_overlapping_graphs_end_in_a_timeout():
    with nvcomm.virtual_world(3, timeout_s=TIMEOUT_S) as world:
        two_streams_at_once(world)
        with pytest.raises(nvcomm.PeerTimeoutError):
            world[0].check()
