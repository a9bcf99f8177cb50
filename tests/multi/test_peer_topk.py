# SPDX-License-Identifier: Apache-2.0
"""sharded_topk in the peer world: a process per rank; see peer_topk.py."""

from __future__ import annotations

import sys

import pytest

from tests.multi.test_peer import ROOT, run


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_divided_between_processes(world_size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    assert run([*command, str(ROOT / "tests" / "multi" / "peer_topk.py")]).count("all steps passed") == world_size
