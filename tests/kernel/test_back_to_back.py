# SPDX-License-Identifier: Apache-2.0
"""Collectives that follow each other in graphs with nothing between them, replayed without waiting."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from tests.kernel.worlds import assert_gathered, coded, words_of

pytestmark = pytest.mark.gpu
SIZES = (4, 4096, 64, 1024, 16384, 8, 4, 2048, 32)


@pytest.mark.parametrize("pdl", ["safe", "early", "off"])
def test_R1_a_call_does_not_overtake_the_one_before(pdl):
    """Nine gathers a graph, of sizes that grow and shrink; the inputs change with each replay."""
    with nvcomm.virtual_world(4, pdl=pdl, timeout_s=2) as world:
        counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in world]
        wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in world]
        graphs = []
        for rank, comm in enumerate(world):
            wants = [torch.stack([coded(r, i, size) for r in range(4)]) for i, size in enumerate(SIZES)]
            ins = [torch.empty_like(want[rank]) for want in wants]
            outs = [torch.zeros_like(want) for want in wants]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
                counters[rank].add_(1)
                for x, want in zip(ins, wants, strict=True):
                    torch.add(want[rank], counters[rank], out=x)
                for x, out in zip(ins, outs, strict=True):
                    comm.all_gather(x, out)
                for want, out in zip(wants, outs, strict=True):
                    wrong[rank].add_((out != want + counters[rank]).sum())
            graphs.append((graph, ins, outs, wants))
        for _ in range(200):
            for rank, comm in enumerate(world):
                with torch.cuda.stream(comm.stream):
                    graphs[rank][0].replay()
        torch.cuda.synchronize()
        for comm in world:
            comm.check()
        assert sum(int(count) for count in wrong) == 0
        assert {comm.audit().dirty_words for comm in world} == {0}


@pytest.mark.parametrize("kind", ["empty", "escape", "mixed"])
def test_R5_reserved_words_in_calls_of_many_sizes(kind):
    with nvcomm.virtual_world(4, timeout_s=1) as world:
        for call, size in enumerate(SIZES):
            xs = [words_of(kind, size, 4 * call + rank) for rank in range(4)]
            assert_gathered(world.all_gather(xs), xs)
        for comm in world:
            comm.check()
        assert {comm.audit().dirty_words for comm in world} == {0}


def test_R12_a_rank_without_rows_waits_for_everybody():
    """One row for four ranks: three of them own nothing, and must not run ahead of the first, which is late."""
    with nvcomm.virtual_world(4, timeout_s=1) as world:
        world.prepare("reduce_scatter", torch.float32)
        values = [16.0 * call for call in range(6)]
        xs = [[torch.full((1, 64), value + rank, device="cuda") for value in values] for rank in range(4)]
        outs = [[torch.zeros((int(rank == 0), 64), device="cuda") for _ in values] for rank in range(4)]

        torch.cuda.synchronize()
        for rank in (1, 2, 3, 0):
            with torch.cuda.stream(world.stream(rank)):
                if rank == 0:  # the others' calls have long been launched, however busy the machine is
                    torch.cuda._sleep(100_000_000)
                for x, out in zip(xs[rank], outs[rank], strict=True):
                    world[rank].reduce_scatter(x, out)
        torch.cuda.synchronize()
        for comm in world:
            comm.check()
        for value, out in zip(values, outs[0], strict=True):
            assert bool((out == 4 * value + 6).all()), value
        assert {comm.audit().dirty_words for comm in world} == {0}
