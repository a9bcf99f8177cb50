# SPDX-License-Identifier: Apache-2.0
"""Bad input on a GPU: a typed error before anything is launched, with nothing lost."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from tests.kernel.worlds import assert_gathered, coded

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world():
    with nvcomm.virtual_world(2, max_bytes=4096, timeout_s=5) as world:
        yield world


BAD = {
    "on the CPU": lambda: torch.zeros(4),
    "not contiguous": lambda: torch.zeros((4, 4), device="cuda").t(),
    "sparse": lambda: torch.zeros((4, 4), device="cuda").to_sparse(),
    "requires grad": lambda: torch.zeros(4, device="cuda", requires_grad=True),
    "too large": lambda: torch.zeros(1025, device="cuda"),
    "conjugate": lambda: torch.zeros(4, device="cuda", dtype=torch.complex64).conj(),
    "not a tensor": lambda: [1, 2, 3],
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_input_is_refused_and_nothing_is_lost(world, what):
    with pytest.raises(nvcomm.UsageError, match="all_gather"):
        world[0].all_gather(BAD[what]())
    xs = [coded(rank, 1, 8) for rank in range(2)]
    assert_gathered(world.all_gather(xs), xs)


def test_a_bad_output_is_refused(world):
    x = torch.zeros(8, device="cuda")
    for out in (
        torch.zeros(8, device="cuda"),
        torch.zeros((2, 8), device="cuda", dtype=torch.float64),
        torch.zeros((2, 8)),
        torch.zeros((8, 2), device="cuda").t(),
    ):
        with pytest.raises(nvcomm.UsageError, match="out"):
            world[0].all_gather(x, out)
    storage = torch.zeros(16, device="cuda")
    with pytest.raises(nvcomm.UsageError, match="overlaps"):
        world[0].all_gather(storage[:8], storage.view(2, 8))


def test_a_world_is_not_built_inside_a_capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), pytest.raises(nvcomm.UsageError, match="capture"):
        nvcomm.virtual_world(2)


def test_a_closed_communicator_is_refused():
    with nvcomm.virtual_world(1) as world:
        comm = world[0]
    with pytest.raises(nvcomm.UsageError, match="closed"):
        comm.all_gather(torch.zeros(4, device="cuda"))
