# SPDX-License-Identifier: Apache-2.0
"""A rank killed in mid-collective, with a GPU for each process; see peer_killed.py."""

from __future__ import annotations

import sys

import pytest

from tests.multi.test_peer import ROOT, run


# Not for one GPU: processes that share it under MPS end together.
@pytest.mark.gpus(2)
@pytest.mark.parametrize("scene", ["replaying", "waiting"])
def test_survivors_are_told_in_time_and_go_on(scene):
    said = run([sys.executable, str(ROOT / "tests" / "multi" / "peer_killed.py"), scene])
    assert f"{scene}: all survivors went on" in said
