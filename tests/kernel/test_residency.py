# SPDX-License-Identifier: Apache-2.0
"""R8 on a GPU: what spins leaves room for what it waits for, where it holds all of the places that it may."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import nvcomm
from nvcomm.options import Pdl
from nvcomm.virtual import VirtualWorld
from tests.kernel.test_all_gather import assert_clean
from tests.mhc_cases import check, make_case

pytestmark = pytest.mark.gpu
HIDDEN, ROWS = 5120, 384


@contextlib.contextmanager
def whole_gpu(pdl: Pdl) -> Iterator[VirtualWorld]:
    """Four ranks that may hold all of the GPU, and leave clean mailboxes."""
    with nvcomm.virtual_world(4, pdl=pdl, timeout_s=2, max_bytes=ROWS * HIDDEN * 2, device_share=1.0) as world:
        yield world
        assert_clean(world)


def run_late(world: VirtualWorld, last: int, call: Callable[[int], None]) -> None:
    """Calls `call(rank)` on each rank's stream, and on that of `last` when the others have long been waiting."""
    torch.cuda.synchronize()
    for rank in sorted(range(len(world)), key=lambda rank: rank == last):
        if rank == last:
            time.sleep(0.02)
        with torch.cuda.stream(world.stream(rank)):
            call(rank)
    torch.cuda.synchronize()
    for comm in world:
        comm.check()


@pytest.mark.parametrize("pdl", ["off", "safe", "early"])
def test_R8_a_publisher_finds_room_beside_all_that_wait_for_it(pdl: Pdl) -> None:
    """Three ranks collect on every multiprocessor long before the last one publishes."""

    def check_with(last: int) -> None:
        case = make_case(4, ROWS, HIDDEN, last, "cuda")
        results = [case.outputs() for _ in world]

        def call(rank: int) -> None:
            new_residual, h = results[rank]
            boundaries[rank].publish(case.xs[rank])
            boundaries[rank].collect(*case.common(), new_residual=new_residual, h=h)

        run_late(world, last, call)
        check(results, case)

    with whole_gpu(pdl) as world:
        boundaries = [comm.mhc(HIDDEN, parts=("publish", "collect")) for comm in world]
        for last in range(4):
            check_with(last)


@pytest.mark.parametrize("first", ["boundary", "gather"])
@pytest.mark.parametrize("pdl", ["safe", "early"])
def test_R8_a_late_rank_finds_room_beside_calls_and_their_dependents(pdl: Pdl, first: str) -> None:
    """Three ranks wait on every multiprocessor, with an early trigger for two calls, long before the last one comes."""

    def check_with(last: int) -> None:
        case = make_case(4, 36, HIDDEN, last, "cuda")
        big = make_case(4, ROWS, HIDDEN, last, "cuda").xs
        gathered = [torch.empty(4, ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in world]
        results = [case.outputs() for _ in world]

        def call(rank: int) -> None:
            new_residual, h = results[rank]
            for index in range(4):
                if (index % 2 == 0) == (first == "gather"):
                    world[rank].all_gather(big[rank], out=gathered[rank])
                else:
                    boundaries[rank](case.xs[rank], *case.common(), new_residual=new_residual, h=h)

        run_late(world, last, call)
        check(results, case)
        for one in gathered:
            assert torch.equal(one, torch.stack(big))

    with whole_gpu(pdl) as world:
        boundaries = [comm.mhc(HIDDEN) for comm in world]
        for last in range(4):
            check_with(last)
