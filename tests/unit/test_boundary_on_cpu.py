# SPDX-License-Identifier: Apache-2.0
"""The PTX of the fused boundary, all-reduce and mHC, run on the CPU: what every rank finds, and clean mailboxes.

Small shapes, in any order of threads and ranks, with words that reach mailboxes late.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig, MhcShape, PublishTarget
from nvcomm.device import FAULT_TIMEOUT
from nvcomm.mailbox import EMPTY, ESCAPE, MailboxLayout
from nvcomm.reference import collectives as reference
from tests.emulator.ranks import Ranks
from tests.mhc_cases import Case, check, make_case, make_experts, put_special_words
from tests.reduction_cases import REDUCING, assert_same


def boundary(ranks: Ranks, config: MhcConfig, case: Case, sources: list[list[int]], clusters: int) -> None:
    """One call of the whole kernel, or of its two halves; checks what every rank finds."""
    rows = case.residual.shape[0]
    common = [ranks.put(one) for one in (case.residual, case.post, case.comb, case.pre, case.norm_weight)]
    results = [case.outputs() for _ in case.xs]
    places = [[ranks.put(one) for one in result] for result in results]

    def grids(config: MhcConfig) -> list:
        return [
            ranks.mhc_launch(config, r, sources[r], [*common, *places[r]], 1e-20, rows, clusters)
            for r in range(len(case.xs))
        ]

    if config.part == "collect":
        halves = MhcConfig(config.layout, config.shape, "publish", pdl=config.pdl)
        ranks.run_together(grids(halves))
    ranks.run_together(grids(config))
    seen = [
        tuple(None if one is None else ranks.get(place, one) for place, one in zip(*pair, strict=True))
        for pair in zip(places, results, strict=True)
    ]
    check(seen, case)


@pytest.mark.parametrize(
    ("part", "two_shot", "world_size", "streams"),
    [
        ("fused", False, 4, 4),
        ("fused", True, 3, 4),
        ("fused", True, 1, 2),
        ("finalize", False, 2, 4),
        ("finalize", True, 4, 4),
        ("collect", False, 3, 4),
    ],
)
def test_boundary_in_one_mailbox(part, two_shot, world_size, streams, seed):
    """More rows than clusters, so that rows are under way while others are mixed; with and without a collapse.

    Half of the contributions hold words that may not travel, infinities and NaN (R5).
    """
    layout = MailboxLayout(world_size, 7 * 64 * 2)
    config = MhcConfig(layout, MhcShape(64, streams, 3), part, two_shot)
    ranks = Ranks(layout, seed, generation=2**32 - 2, late=True)
    plan = [(1, 1, True), (7, 1, True), (3, 2, False), (7, 3, True), (2, 1, False)]
    for call, (rows, clusters, collapse) in enumerate(plan):
        case = make_case(world_size, rows, 64, seed + call, collapse=collapse, streams=streams)
        if part == "finalize":
            experts = make_experts(world_size, rows, 64, 3, seed + call, shared=call % 2 == 0)
            case.xs = experts.contributions()
            sources = [[ranks.put(one) for one in experts.of(r)] for r in range(world_size)]
        else:
            if call % 2 == 1:
                put_special_words(case.xs)
            sources = [[ranks.put(x), 0, 0, 0] for x in case.xs]
        boundary(ranks, config, case, sources, clusters)
    ranks.assert_clean(len(plan), generation=2**32 - 2)


def test_a_kernel_of_the_callers_own_publishes_to_the_target(seed):
    """What `PublishTarget` promises, taken at its word: stores by address alone, and then `collect`."""
    layout, shape = MailboxLayout(2, 5 * 64 * 2), MhcShape(64)
    config = MhcConfig(layout, shape, "collect")
    ranks = Ranks(layout, seed, late=True)
    for call, rows in enumerate((5, 2, 4)):
        case = make_case(2, rows, 64, seed + call)
        case.xs[0].view(torch.int32)[0, 3], case.xs[1].view(torch.int32)[-1, 0] = EMPTY - 2**32, ESCAPE - 2**32
        for rank, x in enumerate(case.xs):
            peers, (multicast_ptr, state) = ranks.box(rank)[:2], ranks.box(rank)[2:4]
            target = PublishTarget.of(layout, shape, rank, tuple(peers), multicast_ptr, state)
            slot = ranks.memory.read(target.state, 4)
            for row, column in itertools.product(range(rows), range(0, 64, 2)):
                word = int(x.view(torch.int32)[row, column // 2]) & 0xFFFFFFFF
                sent = word ^ (1 << 31) if word in (EMPTY, ESCAPE) else word
                at = slot * target.slot_bytes + target.row_offset + row * target.row_bytes + column * 2
                for peer in target.peers:
                    ranks.memory.write(peer + at, 4, sent)
        common = [ranks.put(one) for one in (case.residual, case.post, case.comb, case.pre, case.norm_weight)]
        results = [case.outputs() for _ in range(2)]
        places = [[ranks.put(one) for one in result] for result in results]
        ranks.run_together(
            [ranks.mhc_launch(config, r, [0] * 4, [*common, *places[r]], 1e-20, rows, 1) for r in range(2)]
        )
        check([tuple(map(ranks.get, *pair)) for pair in zip(places, results, strict=True)], case)
    ranks.assert_clean(3)


@pytest.mark.slow
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_row_across_a_cluster(two_shot, seed):
    """2,048 values: two CTAs of 128 threads share a row's norm, three rows one after the other."""
    layout = MailboxLayout(2, 3 * 2048 * 2)
    config = MhcConfig(layout, MhcShape(2048), "fused", two_shot)
    assert config.cluster == 2
    ranks = Ranks(layout, seed, late=True)
    case = make_case(2, 3, 2048, seed)
    boundary(ranks, config, case, [[ranks.put(x), 0, 0, 0] for x in case.xs], 1)
    ranks.assert_clean(1)


def test_R3_gathers_of_another_size_find_what_reductions_left(seed):
    """Both protocols and the boundary share one mailbox: each finds every word EMPTY that it is going to use."""
    layout = MailboxLayout(2, 4 * 64 * 2)
    reducing, fused = ReduceConfig(layout, "bf16", threads=32), MhcConfig(layout, MhcShape(64), two_shot=True)
    ranks, calls = Ranks(layout, seed, late=True), 0
    for call, rows in enumerate((4, 1, 3, 4)):
        case = make_case(2, rows, 64, seed + call)
        sources = [ranks.put(x) for x in case.xs]
        want = reference.all_reduce(case.xs)
        for kernel in REDUCING.values():
            outs = [ranks.put(torch.zeros_like(want)) for _ in range(2)]
            ranks.run_together(
                [ranks.reduce_launch(kernel, reducing, r, sources[r], outs[r], [want.nbytes], 1) for r in range(2)]
            )
            assert_same([ranks.get(out, want) for out in outs], want)
        boundary(ranks, fused, case, [[source, 0, 0, 0] for source in sources], 1)
        calls += 3
    ranks.assert_clean(calls)


@pytest.mark.parametrize("two_shot", [False, True])
def test_R10_a_rank_that_does_not_come_to_a_boundary_is_named(two_shot, seed):
    """By two-shot by the owners, who wait for it, and not by those who miss owners' sums."""
    rows, hidden = 3, 256
    layout = MailboxLayout(3, rows * hidden * 2)
    config = MhcConfig(layout, MhcShape(hidden), "fused", two_shot)
    ranks = Ranks(layout, seed, timeout_ns=300_000)
    case = make_case(3, rows, hidden, seed)
    common = [ranks.put(one) for one in (case.residual, case.post, case.comb, case.pre, case.norm_weight)]
    places = {r: [ranks.put(one) for one in case.outputs()] for r in (0, 2)}
    launches = []
    for r in (0, 2):
        sources = [ranks.put(case.xs[r]), 0, 0, 0]
        launches.append(ranks.mhc_launch(config, r, sources, [*common, *places[r]], 1e-20, rows, rows))
    ranks.run_together(launches)
    for rank in (0, 2):
        assert ranks.fault(rank)[:3] == [FAULT_TIMEOUT, rank, 1]
        assert ranks.get(places[rank][0], case.residual).isnan().any()
