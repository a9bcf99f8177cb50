# SPDX-License-Identifier: Apache-2.0
"""The delayed transport on a GPU: copies that land late and out of order, the own one included."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from tests.kernel.worlds import assert_gathered, coded, words_of

pytestmark = pytest.mark.gpu
SIZES = (4, 4096, 16, 64, 16384, 4, 300, 2, 1)


def test_delayed_gathers_arrive_bit_for_bit():
    with nvcomm.virtual_world(4, transport="delayed", seed=3, timeout_s=5) as world:
        for call, size in enumerate((*SIZES, *reversed(SIZES))):
            xs = [words_of(("random", "mixed")[call % 2], size, call * 4 + rank) for rank in range(4)]
            assert_gathered(world.all_gather(xs), xs)
        assert {comm.audit().dirty_words for comm in world} == {0}


def replay(world, launches):
    """Graphs of three gathers of different sizes, one agent for each; wrong words in all."""
    trios = [(16, 4, 1024), (4, 1024, 16), (1024, 16, 4)]
    counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in world]
    wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in world]
    graphs = []
    for trio in trios:
        made = []
        for rank, comm in enumerate(world):
            xs = [coded(rank, i, size) for i, size in enumerate(trio)]
            wants = [torch.stack([coded(r, i, size) for r in range(len(world))]) for i, size in enumerate(trio)]
            outs = [torch.zeros_like(want) for want in wants]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
                counters[rank].add_(1)
                moved = [x + counters[rank] * 7 for x in xs]
                with comm.serving():
                    for x, out in zip(moved, outs, strict=True):
                        comm.all_gather(x, out)
                for want, out in zip(wants, outs, strict=True):
                    wrong[rank].add_((out != want + counters[rank] * 7).sum())
            made.append((graph, xs, wants, outs, moved))
        graphs.append(made)
    for launch in range(launches):
        for rank, comm in enumerate(world):
            with torch.cuda.stream(comm.stream):
                graphs[launch * 5 % 3 if launch % 4 else launch % 3][rank][0].replay()
    torch.cuda.synchronize()
    return sum(int(count) for count in wrong)


def test_delayed_graphs_show_no_wrong_word():
    with nvcomm.virtual_world(4, transport="delayed", seed=5, timeout_s=5) as world:
        assert replay(world, 300) == 0
        for comm in world:
            comm.check()
        assert {comm.audit().dirty_words for comm in world} == {0}


def test_late_copy_fails_on_it_by_itself():
    """The negative control: nothing is held back here, the own copy is late because copies are."""
    with nvcomm.virtual_world(4, transport="delayed", protocol="late-copy", seed=5, timeout_s=0.5) as world:
        assert replay(world, 300) > 0
