# SPDX-License-Identifier: Apache-2.0
"""A rank killed in mid-collective, with a GPU for each process; see peer_killed.py."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.multi.test_peer import ROOT, run


@pytest.mark.gpu
@pytest.mark.parametrize("scene", ["replaying", "waiting"])
def test_survivors_are_told_in_time_and_go_on(scene):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: processes that share one under MPS end together")
    said = run([sys.executable, str(ROOT / "tests" / "multi" / "peer_killed.py"), scene])
    assert f"{scene}: all survivors went on" in said
