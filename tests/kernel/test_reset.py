# SPDX-License-Identifier: Apache-2.0
"""reset() with markers (docs/mailbox.md R10b), on a GPU: what a communicator that publishes by multicast does.

A virtual world has no multicast address, so here the markers travel by a store per rank; all the rest is the same.
"""

from __future__ import annotations

import pytest
import torch

import nvcomm
from nvcomm.collectives.engine import THREADS
from nvcomm.collectives.marker import Marker
from nvcomm.mailbox import EMPTY
from tests.kernel.worlds import assert_gathered, words_of

pytestmark = pytest.mark.gpu
RANKS = 3


def markers(world):
    engines = [comm.engine for comm in world]
    return [
        Marker(engine.memory, engine.layout, engine._state.data_ptr(), max_ctas=engine.max_ctas, threads=THREADS)
        for engine in engines
    ]


@pytest.mark.parametrize("max_bytes", [1 << 12, 1 << 20])
def test_R10b_markers_arm_mailboxes_full_of_old_words(max_bytes):
    with nvcomm.virtual_world(RANKS, max_bytes=max_bytes, timeout_s=3) as world:
        made = markers(world)
        for comm in world:
            armed = comm.engine.memory.local()[: comm.engine.layout.faults_base // 4]
            armed.random_(0, 2**31 - 1)
        for marker in made:
            marker.blank()
        assert [marker.missing() for marker in made] == [(0, 1, 2)] * RANKS
        for marker in made[1:]:
            marker.publish()
        assert [marker.missing() for marker in made] == [(0,)] * RANKS
        with pytest.raises(nvcomm.GroupError, match="rank 1: reset\\(\\) waited 0.2 s for the markers of ranks"):
            made[1].wait(0.2)
        made[0].publish()
        for marker in made:
            marker.wait(3.0)
        torch.cuda.synchronize()
        for comm in world:
            comm.engine.arm(100)
            assert comm.audit().dirty_words == 0
        for size in (4, max_bytes // 4, 16):
            xs = [words_of("mixed", size, rank) for rank in range(RANKS)]
            assert_gathered(world.all_gather(xs), xs)


def test_R10b_a_marker_is_EMPTY_in_every_word():
    with nvcomm.virtual_world(RANKS, max_bytes=5000, timeout_s=3) as world:
        made = markers(world)
        for marker in made:
            marker.blank()
        for marker in made:
            marker.publish()
        torch.cuda.synchronize()
        for comm in world:
            words = comm.engine.memory.local()
            end = comm.engine.layout.faults_base // 4
            assert (words[:end] == EMPTY - 2**32).all()
            assert (words[end:] == 0).all()
