# SPDX-License-Identifier: Apache-2.0
"""Reductions in the peer world: a process per rank; see peer_reductions.py."""

from __future__ import annotations

import sys

import pytest

from tests.multi.test_peer import ROOT, run


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions_between_processes(world_size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    program = str(ROOT / "tests" / "multi" / "peer_reductions.py")
    assert run([*command, program]).count("all reductions right") == world_size
