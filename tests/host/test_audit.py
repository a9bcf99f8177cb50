# SPDX-License-Identifier: Apache-2.0
"""The audit after every test finds a word that was left behind, and leaves alone what has to be dirty."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from tests.audit import ended_well


def test_a_world_that_left_a_word_behind_does_not_close_in_silence():
    world = nvcomm.virtual_world(2, "cpu")
    world[1].engine._port.own.rows[1][0][3] = 7
    with pytest.raises(AssertionError, match="words left in the mailboxes"), world:
        world.all_gather([torch.ones(4), torch.ones(4)])
    with pytest.raises(nvcomm.UsageError, match="closed"):
        world[0].check()


def test_a_world_whose_ranks_are_at_different_places_does_not_either():
    world = nvcomm.virtual_world(2, "cpu")
    world[1].engine._port.state[1] += 1
    with pytest.raises(AssertionError, match="different places"):
        world.close()


def test_a_failing_test_keeps_its_own_error():
    def fails():
        with nvcomm.virtual_world(2, "cpu") as world:
            world[1].engine._port.own.rows[1][0][3] = 7
            raise ArithmeticError

    pytest.raises(ArithmeticError, fails)


def test_a_broken_rank_and_a_wrong_protocol_are_left_alone(ranks):
    with nvcomm.virtual_world(2, "cpu", timeout_s=0.1) as world, pytest.raises(nvcomm.PeerTimeoutError):
        world.run(lambda comm: comm.all_gather(torch.ones(4)) if comm.rank else None)
    assert ended_well(ranks(2).engines)
    assert not ended_well(ranks(2, mutations=frozenset({"R3"})).engines)
