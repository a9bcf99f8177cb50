# SPDX-License-Identifier: Apache-2.0
"""The plan: the same on every rank, of the promised mix, and able to name the graph of a replay long after."""

from __future__ import annotations

import numpy as np
import pytest

from nvcomm.errors import UsageError
from stress import sum_oracle
from stress.plan import BIG_EVERY, MAX_BYTES, MIN_BYTES, SMALL_BYTES, Plan, PlanConfig


def all_sizes(plan: Plan, *, big: bool) -> list[int]:
    return [4 * words for graph in plan.graphs if graph.big == big for sizes in graph.replays for words in sizes]


def test_the_seed_alone_decides():
    one, two = Plan(PlanConfig(9, 4)), Plan(PlanConfig(9, 4))
    assert one.graphs == two.graphs
    assert np.array_equal(one.order(0, 5000), two.order(0, 5000))
    other = Plan(PlanConfig(10, 4))
    assert one.graphs != other.graphs
    assert not np.array_equal(one.order(0, 5000), other.order(0, 5000))


def test_the_order_does_not_depend_on_how_it_is_asked_for():
    plan = Plan(PlanConfig(9, 4))
    whole = plan.order(0, 3000)
    assert np.array_equal(whole, np.concatenate([plan.order(first, 100) for first in range(0, 3000, 100)]))


def test_sizes_are_log_uniform_and_differ_within_a_replay(seed):
    plan = Plan(PlanConfig(seed, 4, replays_per_graph=8, num_small=128))
    small = all_sizes(plan, big=False)
    assert min(small) >= MIN_BYTES
    assert max(small) <= SMALL_BYTES
    assert 0.15 < np.mean(np.array(small) < 128) < 0.35  # a quarter of the decades lies below 128 bytes
    assert any(size % 16 for size in small)
    for graph in plan.graphs:
        for sizes in graph.replays:
            assert len(set(sizes)) == 3


def test_one_graph_in_a_thousand_is_big_and_reaches_megabytes(seed):
    plan = Plan(PlanConfig(seed, 4, num_big=32))
    order = plan.order(0, 1_000_000)
    share = np.mean(order >= plan.config.num_small)
    assert 0.8 / BIG_EVERY < share < 1.2 / BIG_EVERY
    assert all(max(graph.replays[0]) * 4 > SMALL_BYTES for graph in plan.graphs if graph.big)
    assert (1 << 20) < max(all_sizes(plan, big=True)) <= MAX_BYTES


def test_every_rank_is_late_in_some_graphs_and_none_in_others(seed):
    late = {graph.late_rank for graph in Plan(PlanConfig(seed, 4, num_small=256)).graphs}
    assert late == {None, 0, 1, 2, 3}


def test_a_replay_finds_its_graph():
    plan = Plan(PlanConfig(4, 2, replays_per_graph=3))
    order = plan.order(0, 100)
    for replay in (0, 1, 2, 3, 100, 299):
        graph = plan.graphs[order[replay // 3]]
        assert plan.graph_of(replay) is graph
        assert plan.row_words(1, replay) == graph.replays[replay % 3][1]


@pytest.mark.parametrize("replays", [1, 3, 4, 29, 3000])
def test_a_run_knows_the_sizes_of_its_replays(replays):
    plan = Plan(PlanConfig(4, 2, replays_per_graph=3, num_small=16))
    want = {tuple(plan.row_words(gather, replay) for gather in range(3)) for replay in range(replays)}
    assert plan.sizes_of(replays) == want


def test_collectives_that_no_replay_held_are_missed():
    assert sum_oracle.missing("all_gather", [(4, 8, 12)]) == ()
    every = [(words,) for words in range(4, 400, 4)]
    assert sum_oracle.missing("mixed", every) == ()
    assert sum_oracle.missing("mixed", []) == sum_oracle.WAYS["mixed"]
    without = [one for one in every if sum_oracle.way_of("mixed", 0, one[0]) != "scatter"]
    assert sum_oracle.missing("mixed", without) == ("scatter",)


@pytest.mark.parametrize(
    ("config", "match"), [(PlanConfig(1, 9), "9 ranks"), (PlanConfig(1, 4, max_bytes=16), "at most 16 bytes")]
)
def test_what_cannot_be_planned_is_refused(config, match):
    with pytest.raises(UsageError, match=match):
        Plan(config)
