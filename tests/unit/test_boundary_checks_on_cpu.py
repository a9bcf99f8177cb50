# SPDX-License-Identifier: Apache-2.0
"""The boundary kernel's PTX on the CPU with device checks: ranks compare their calls before one waits for another."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from nvcomm.collectives.all_reduce_mhc_config import MhcConfig, MhcShape
from nvcomm.device import FAULT_MISMATCH
from nvcomm.mailbox import MailboxLayout
from tests.emulator.ranks import Ranks
from tests.mhc_cases import check, make_case

HIDDEN = 256  # 32 chunks: by two-shot rank i owns row i
LAYOUT = MailboxLayout(3, 3 * HIDDEN * 2)


def boundary(ranks: Ranks, two_shot: bool, seed: int, *, rows=(3, 3, 3), tags=(0, 0, 0)):
    """A call of every rank; its results, and rank 0's case."""
    config = MhcConfig(LAYOUT, MhcShape(HIDDEN), "fused", two_shot, device_checks=True)
    cases = [make_case(3, num_rows, HIDDEN, seed) for num_rows in rows]
    launches, places = [], []
    for rank, case in enumerate(cases):
        common = [ranks.put(one) for one in (case.residual, case.post, case.comb, case.pre, case.norm_weight)]
        places.append([ranks.put(one) for one in case.outputs()])
        source, call = [ranks.put(case.xs[rank]), 0, 0, 0], (1, 7, tags[rank])
        launches.append(ranks.mhc_launch(config, rank, source, [*common, *places[rank]], 1e-20, rows[rank], 1, call))
    ranks.run_together(launches)
    results = [
        tuple(ranks.get(place, one) for place, one in zip(places[rank], case.outputs(), strict=True))
        for rank, case in enumerate(cases)
    ]
    return results, cases[0]


@pytest.mark.parametrize("two_shot", [False, True])
def test_R11_equal_calls_pass(two_shot, seed):
    ranks = Ranks(LAYOUT, seed, late=True)
    for _ in range(2):
        check(*boundary(ranks, two_shot, seed))
    ranks.assert_clean(2)


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("differ", [{"rows": (3, 1, 3)}, {"tags": (0, 9, 0)}])
def test_R11_every_rank_sees_that_calls_differ(two_shot, differ, seed):
    """A rank of more rows than another must not wait for what that one never sends instead of saying so."""
    ranks = Ranks(LAYOUT, seed, timeout_ns=300_000, late=True)
    boundary(ranks, two_shot, seed, **differ)
    assert {ranks.fault(rank)[0] for rank in range(3)} == {FAULT_MISMATCH}
