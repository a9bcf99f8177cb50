# SPDX-License-Identifier: Apache-2.0
"""Calls and resets that end half way, and calls that one rank refuses: nobody is left waiting, nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch

import nvcomm
from nvcomm.host import local_engines
from tests.mhc_cases import make_case

TIMEOUT_S = 60.0
HIDDEN = 128


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter"])
def test_an_output_of_one_rank_is_refused_before_any_rank_sends(op):
    with nvcomm.virtual_world(3, "cpu", max_bytes=4096, timeout_s=TIMEOUT_S) as world:
        xs = [torch.full((3, 4), float(rank)) for rank in range(3)]
        outs = getattr(world, op)(xs)
        start = time.monotonic()
        with pytest.raises(nvcomm.UsageError, match=f"{op}: out"):
            getattr(world, op)(xs, [*outs[:2], xs[2]])
        assert time.monotonic() - start < TIMEOUT_S / 2
        again = getattr(world, op)(xs, outs)  # nobody is broken
        assert all(torch.equal(y, out) for y, out in zip(again, outs, strict=True))


class Interrupted:
    """A group whose exchange is cut short, as by Control-C."""

    rank, world_size = 0, 1

    def exchange(self, tag, value, timeout_s):
        raise KeyboardInterrupt

    barrier = exchange


def test_R10b_a_reset_that_is_interrupted_leaves_the_rank_broken():
    (engine,) = local_engines(1, 1024, timeout_s=TIMEOUT_S)
    x, out = torch.ones(4), torch.zeros(4)
    with engine:
        engine.all_gather(x, out)
        group, engine._group = engine._group, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            engine.reset()
        with pytest.raises(nvcomm.NvcommError, match=r"KeyboardInterrupt ended reset\(\) half-way"):
            engine.all_gather(x, out)
        engine._group = group
        engine.reset()
        engine.all_gather(x, out)
        assert torch.equal(x, out)


def test_a_boundary_that_is_refused_leaves_what_it_would_overwrite(seed):
    with nvcomm.virtual_world(1, "cpu", max_bytes=4096, timeout_s=TIMEOUT_S) as world:
        boundary, case = world[0].mhc(HIDDEN), make_case(1, 2, HIDDEN, seed)
        before = case.residual.clone()
        with world[0].engine._busy, pytest.raises(nvcomm.UsageError, match="another thread is inside"):
            boundary(case.xs[0], *case.common(), new_residual=case.residual)
        assert torch.equal(case.residual, before)


def test_R11_a_tag_set_between_two_halves_is_the_next_calls(seed, monkeypatch):
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    with nvcomm.virtual_world(2, "cpu", max_bytes=4096, timeout_s=TIMEOUT_S) as world:
        boundaries = [comm.mhc(HIDDEN, parts=("publish", "collect")) for comm in world]
        case = make_case(2, 2, HIDDEN, seed)
        results = [None, None]

        def call(comm):
            boundaries[comm.rank].publish(case.xs[comm.rank])
            comm.tag = 7
            results[comm.rank] = boundaries[comm.rank].collect(*case.common())

        world.run(call)
        assert all(torch.equal(result[0], case.wanted()[0]) for result in results)


def test_a_half_that_a_reset_forgot_or_that_was_refused_is_not_collected(seed):
    with nvcomm.virtual_world(2, "cpu", max_bytes=4096, timeout_s=TIMEOUT_S) as world:
        boundaries = [comm.mhc(HIDDEN, parts=("publish", "collect")) for comm in world]
        case = make_case(2, 2, HIDDEN, seed)
        world.run(lambda comm: boundaries[comm.rank].publish(case.xs[comm.rank]))
        with world[0].engine._busy, pytest.raises(nvcomm.UsageError, match="another thread is inside"):
            boundaries[0].collect(*case.common())
        with pytest.raises(nvcomm.UsageError, match=r"all_reduce_mhc\.collect has to be next"):
            world[0].all_gather(case.xs[0])  # over what was published
        world.reset()
        with world[0].engine._busy, pytest.raises(nvcomm.UsageError, match="another thread is inside"):
            boundaries[0].publish(case.xs[0])
        with pytest.raises(nvcomm.UsageError, match="nothing was published"):
            boundaries[0].collect(*case.common())
        ys = world.all_gather(case.xs)
        assert all(torch.equal(y, torch.stack(case.xs)) for y in ys)


def test_a_close_that_is_refused_can_be_called_again():
    with nvcomm.virtual_world(1, "cpu", max_bytes=4096, timeout_s=TIMEOUT_S) as world:
        comm, engine = world[0], world[0].engine
        with engine._busy, pytest.raises(nvcomm.UsageError, match="another thread is inside"):
            comm.close()
        comm.close()
        with pytest.raises(nvcomm.UsageError, match="engine is closed"):
            engine.check()
