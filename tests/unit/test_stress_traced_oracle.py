# SPDX-License-Identifier: Apache-2.0
"""The oracle traced by CuTe DSL gives the words that numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Uint32  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from stress import oracle  # noqa: E402
from stress.host_oracle import HostOracle  # noqa: E402

NUM_WORDS = 5000


@cute.jit
def trace_row(row: cute.Tensor, seed_key: Uint32, reserved: Uint32, rank: Int32, gather: Int32, replay: Uint32):
    """The oracle as the DSL sees it, run by the host's own processor."""
    row_key = oracle.key(seed_key, Uint32(rank), Uint32(gather), replay, Uint32)
    for index in range(cute.size(row) - 1):
        row[index] = Int32(oracle.payload(row_key, Uint32(index), reserved, Uint32))
    row[cute.size(row) - 1] = Int32(oracle.late_ns(seed_key, replay, Uint32))


@pytest.fixture
def arch(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


@pytest.mark.parametrize("reserved", [0, oracle.RESERVED_PER_65536])
@pytest.mark.parametrize(("rank", "gather", "replay"), [(0, 0, 0), (3, 2, 1_999_999), (7, 1, (1 << 27) + 5)])
def test_both_definitions_agree(arch, seed, rank, gather, replay, reserved):
    host = HostOracle(seed, oracle.MAX_RANKS, reserved)
    traced = torch.zeros(NUM_WORDS + 1, dtype=torch.int32)
    trace_row(from_dlpack(traced), Uint32(host.seed_key), Uint32(reserved), Int32(rank), Int32(gather), Uint32(replay))
    assert np.array_equal(traced[:-1].numpy().view(np.uint32), host.row(rank, gather, replay, NUM_WORDS))
    assert int(traced[-1]) == host.late_ns(replay)
