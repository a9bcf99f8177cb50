# SPDX-License-Identifier: Apache-2.0
"""A compile check of the stress harness's kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

from nvcomm import jit
from stress import oracle
from tests.unit.stress_kernels import kernels

RANKS = 4


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_kernels_compile_without_local_memory_and_with_full_edges(target):
    built = {
        name: jit.artifacts(kernel, *kernel.fake_args(), arch=target) for name, kernel in kernels(RANKS, 5120).items()
    }
    for one in built.values():
        (usage,) = one.usage.values()
        assert usage.frame_bytes == 0
        # No trigger and no wait: full edges to the collectives around it, whatever R1 variant they run.
        assert "griddepcontrol" not in one.ptx
    # Every output is read where it is checked.
    assert built["turn"].ptx.count("ld.global.b32") == RANKS * oracle.GATHERS_PER_REPLAY
    assert built["sum_turn"].ptx.count("ld.global.b32") == oracle.GATHERS_PER_REPLAY
    assert built["late"].ptx.count("%globaltimer") == 2
