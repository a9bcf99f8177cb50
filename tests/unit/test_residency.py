# SPDX-License-Identifier: Apache-2.0
"""R8 on the host: how many CTAs fit, and who holds which share of a device."""

from __future__ import annotations

import pytest

from nvcomm.errors import UsageError
from nvcomm.residency import Claims, ctas_per_rank, refusal

H200 = {"num_sms": 132, "ctas_per_sm": 4}


@pytest.mark.parametrize(
    ("ranks", "early", "share", "ctas"),
    [(4, False, 0.5, 65), (4, True, 0.5, 32), (4, False, 1.0, 131), (1, False, 1.0, 527), (8, True, 1.0, 32)],
)
def test_R8_all_ctas_of_all_ranks_and_their_waiting_dependents_fit(ranks, early, share, ctas):
    got = ctas_per_rank(**H200, ranks_on_device=ranks, early_trigger=early, device_share=share)
    assert got == ctas
    assert got * ranks * (2 if early else 1) + 1 <= 132 * 4 * share  # and one publisher


@pytest.mark.parametrize("num_sms", [3, 132])
@pytest.mark.parametrize("ctas_per_sm", [1, 2, 4, 8])
@pytest.mark.parametrize("agents", [1, 2, 4, 8])
def test_R8_agents_of_the_delayed_transport_find_room_wherever_the_calls_lie(num_sms, ctas_per_sm, agents):
    """The calls' CTAs are laid out as badly as they can be: each multiprocessor just too full for an agent."""
    try:
        ctas = ctas_per_rank(
            num_sms=num_sms,
            ctas_per_sm=ctas_per_sm,
            ranks_on_device=1,
            early_trigger=False,
            device_share=1.0,
            agents=agents,
        )
    except UsageError:
        assert num_sms == 3  # few multiprocessors, many agents
        assert agents >= num_sms - 1
        return
    half = -(-ctas_per_sm // 2)
    keeps_out = ctas_per_sm - half + 1
    free = [ctas_per_sm - min(keeps_out, max(0, ctas - i * keeps_out)) for i in range(num_sms)]
    spread = [ctas_per_sm - (ctas // num_sms + (i < ctas % num_sms)) for i in range(num_sms)]
    for places in (free, spread):
        assert sum(left // half for left in places) >= agents


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(UsageError, match="device_share"):
        ctas_per_rank(**H200, ranks_on_device=1, early_trigger=False, device_share=share)


def test_R8_a_share_without_a_place_for_each_rank_is_refused():
    with pytest.raises(UsageError, match="resident CTAs"):
        ctas_per_rank(num_sms=2, ctas_per_sm=1, ranks_on_device=4, early_trigger=False, device_share=1.0)


def test_R8_shares_add_up_over_communicators_until_they_are_let_go():
    claims = Claims()
    claims.hold("gpu", "a", 0.5)
    assert refusal("gpu", [claims.held("gpu")], 0.5) is None
    claims.hold("gpu", "b", 0.5)
    assert "0.1" in str(refusal("gpu", [claims.held("gpu")], 0.1))
    assert refusal("other", [claims.held("other")], 1.0) is None
    claims.let_go("gpu", "a")
    claims.let_go("gpu", "a")
    assert refusal("gpu", [claims.held("gpu")], 0.5) is None


def test_R8_a_communicator_of_several_processes_counts_once():
    held = [{"shared": 0.5}, {"shared": 0.5}, {"shared": 0.5, "own": 0.25}]
    assert refusal("gpu", held, 0.25) is None
    assert refusal("gpu", held, 0.26) is not None


def test_R8_ten_tenths_are_a_whole():
    assert refusal("gpu", [{str(i): 0.1 for i in range(9)}], 0.1) is None
