# SPDX-License-Identifier: Apache-2.0
"""The list of faults on a GPU, and what needs a mailbox to be written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import nvcomm
from stress.faults import virtual, virtual_work
from tests.kernel.worlds import coded

pytestmark = pytest.mark.gpu
TIMEOUT_S = 0.3


@pytest.mark.parametrize("fault", virtual.FAULTS, ids=lambda fault: fault.name)
def test_it_ends_as_it_has_to(fault):
    row = virtual.run(fault)
    assert row.good, (str(row.seen), str(row.expected), row.problems)


def test_a_program_without_a_fault_does_not_pass_for_one():
    """The negative control: nobody is missing here, and the table says so."""
    fault = virtual.FAULTS[0]
    row = virtual.run(replace(fault, name="calls like the others", work=virtual_work.right_calls))
    assert not row.good
    assert row.seen == virtual.GOES_ON


def test_a_rank_behind_another_that_waits_names_the_root():
    """Rank 2 never comes. Rank 0 found its words of the first call, and so waits for rank 1, which waits for rank 2."""
    with nvcomm.virtual_world(3, timeout_s=TIMEOUT_S) as world:
        xs = [coded(rank, 1, 64) for rank in range(3)]
        outs = [torch.zeros((3, 64), dtype=torch.int32, device="cuda") for _ in range(3)]
        engine = world[0].engine
        row = engine.layout.row_offset(0, 2) // 4
        engine.memory.local()[row : row + 64].copy_(xs[2])
        torch.cuda.synchronize()

        def work(comm):
            for _ in range((2, 1, 0)[comm.rank]):
                comm.all_gather(xs[comm.rank], outs[comm.rank])

        world.run(work)
        torch.cuda.synchronize()
        with pytest.raises(nvcomm.PeerTimeoutError) as caught:
            world[0].check()
        assert (caught.value.src_rank, caught.value.root_rank) == (1, 2)
        assert (caught.value.generation, caught.value.slot) == (1, 1)
        with pytest.raises(nvcomm.PeerTimeoutError) as caught:
            world[1].check()
        assert (caught.value.src_rank, caught.value.root_rank, caught.value.generation) == (2, 2, 0)
