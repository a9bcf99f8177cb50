# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary between CPU ranks, and reductions through the communicator."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from nvcomm.errors import PeerTimeoutError, UsageError
from nvcomm.host.all_reduce_mhc_math import finalize, fma
from nvcomm.reference import collectives as reference
from tests.mhc_cases import check, make_case, make_experts, put_special_words, stepped

HIDDEN = 64
ROWS = [3, 1, 8, 2, 8, 1]  # growing and shrinking in one mailbox


def world(world_size: int = 4, **options: object) -> nvcomm.virtual.VirtualWorld:
    return nvcomm.virtual_world(world_size, "cpu", **{"max_bytes": 8 * HIDDEN * 2, "timeout_s": 60.0, **options})


def clean(ranks: nvcomm.virtual.VirtualWorld, calls: int) -> bool:
    audits = [comm.audit() for comm in ranks]
    return all(audit.dirty_words == 0 and audit.generation == calls for audit in audits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("collapse", [True, False])
def test_boundary_is_the_reference_for_both_protocols(world_size, collapse, seed):
    with world(world_size) as ranks:
        boundaries = [comm.mhc(HIDDEN) for comm in ranks]
        calls = 0
        for i, rows in enumerate(ROWS):
            case = make_case(world_size, rows, HIDDEN, seed + i, collapse=collapse)
            for protocol in ("ll", "two_shot"):
                results = [case.outputs() for _ in ranks]

                def call(comm, case=case, results=results, protocol=protocol):
                    out = results[comm.rank]
                    boundaries[comm.rank](
                        case.xs[comm.rank], *case.common(), new_residual=out[0], h=out[1], protocol=protocol
                    )

                ranks.run(call)
                check(results, case)
                gathered = ranks.all_gather(case.xs)
                assert torch.equal(gathered[0], torch.stack(case.xs))
                calls += 2
        assert clean(ranks, calls)


@pytest.mark.parametrize("shared", [True, False])
def test_finalize_is_the_reference(shared, seed):
    with world() as ranks:
        boundaries = [comm.mhc(HIDDEN, top_k=3) for comm in ranks]
        for i, rows in enumerate(ROWS):
            experts = make_experts(4, rows, HIDDEN, 3, seed + i, shared=shared)
            case = make_case(4, rows, HIDDEN, seed + i)
            case.xs = experts.contributions()
            results = [None] * 4

            def call(comm, case=case, experts=experts, results=results):
                results[comm.rank] = boundaries[comm.rank].finalize(*experts.of(comm.rank), *case.common())

            ranks.run(call)
            check(results, case)
        assert clean(ranks, len(ROWS))


def test_publish_and_collect_apart(seed):
    with world() as ranks:
        boundaries = [comm.mhc(HIDDEN, parts=("publish", "collect")) for comm in ranks]
        for i, rows in enumerate(ROWS):
            case = make_case(4, rows, HIDDEN, seed + i)
            ranks.run(lambda comm, case=case: boundaries[comm.rank].publish(case.xs[comm.rank]))
            results = [None] * 4

            def call(comm, case=case, results=results):
                results[comm.rank] = boundaries[comm.rank].collect(*case.common())

            ranks.run(call)
            check(results, case)
        assert clean(ranks, len(ROWS))


def test_R5_special_words_of_a_contribution(seed):
    """Words that may not travel do not hang, infinities and NaN are kept; fused by both protocols, and in halves."""
    with world(max_bytes=12 * HIDDEN * 2) as ranks:
        boundaries = [comm.mhc(HIDDEN, parts=("fused", "publish", "collect")) for comm in ranks]
        case = make_case(4, 12, HIDDEN, seed)
        put_special_words(case.xs)
        assert 0 < case.wanted()[0].isnan().sum() < case.residual.numel() / 2
        for how in ("ll", "two_shot", "apart"):
            results = [None] * 4

            def call(comm, how=how, results=results):
                boundary, x = boundaries[comm.rank], case.xs[comm.rank]
                if how == "apart":
                    boundary.publish(x)
                    results[comm.rank] = boundary.collect(*case.common())
                else:
                    results[comm.rank] = boundary(x, *case.common(), protocol=how)

            ranks.run(call)
            check(results, case)
        assert clean(ranks, 3)


def test_halves_have_to_pair_up(seed):
    with world(2) as ranks:
        boundaries = [comm.mhc(HIDDEN, parts=("fused", "publish", "collect")) for comm in ranks]
        case, other = make_case(2, 3, HIDDEN, seed), make_case(2, 4, HIDDEN, seed)
        with pytest.raises(UsageError, match="nothing was published"):
            boundaries[0].collect(*case.common())
        ranks.run(lambda comm: boundaries[comm.rank].publish(case.xs[comm.rank]))
        for call in (
            lambda: ranks[0].all_gather(case.xs[0]),
            lambda: ranks[0].all_reduce(case.xs[0]),
            lambda: ranks[0].reduce_scatter(case.xs[0]),
            lambda: boundaries[0](case.xs[0], *case.common()),
            lambda: boundaries[0].publish(case.xs[0]),
        ):
            with pytest.raises(UsageError, match="has to be next"):
                call()
        with pytest.raises(UsageError, match="residual"):
            boundaries[0].collect(*other.common())
        with pytest.raises(UsageError, match="another boundary's"):
            ranks[0].mhc(HIDDEN, parts=("publish", "collect")).collect(*case.common())
        results = [None, None]

        def collect(comm):
            results[comm.rank] = boundaries[comm.rank].collect(*case.common())

        ranks.run(collect)
        check(results, case)
        assert clean(ranks, 1)


def test_residual_may_be_updated_in_place(seed):
    with world(2) as ranks:
        boundaries = [comm.mhc(HIDDEN) for comm in ranks]
        case = make_case(2, 5, HIDDEN, seed)
        own = [case.residual.clone() for _ in ranks]
        results = [None, None]

        def call(comm):
            arguments = (own[comm.rank], *case.common()[1:])
            results[comm.rank] = boundaries[comm.rank](case.xs[comm.rank], *arguments, new_residual=own[comm.rank])

        ranks.run(call)
        check(results, case)


def test_a_rank_that_does_not_come_leaves_ff(seed):
    with world(2, timeout_s=0.3) as ranks:
        boundaries = [comm.mhc(HIDDEN) for comm in ranks]
        case = make_case(2, 2, HIDDEN, seed)
        new_residual, h = case.outputs()
        with pytest.raises(PeerTimeoutError):
            boundaries[0](case.xs[0], *case.common(), new_residual=new_residual, h=h)
        for out in (new_residual, h):
            assert (out.view(torch.uint8) == 0xFF).all()


def test_no_rows_touch_nothing():
    with world(2) as ranks:
        boundaries = [comm.mhc(HIDDEN) for comm in ranks]
        case = make_case(2, 0, HIDDEN, 1)
        new_residual, h = boundaries[0](case.xs[0], *case.common())
        assert new_residual.shape == (0, 4, HIDDEN)
        assert h.shape == (0, HIDDEN)
        assert clean(ranks, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.zeros(3, HIDDEN)}, "float32"),
        ({"x": torch.zeros(3, 32).bfloat16()}, "wanted"),
        ({"residual": torch.zeros(3, 3, HIDDEN).bfloat16()}, "residual"),
        ({"post": torch.zeros(3, 4).double()}, "post"),
        ({"comb": torch.zeros(3, 4)}, "comb"),
        ({"pre": None}, "go together"),
        ({"norm_weight": torch.zeros(HIDDEN + 1).bfloat16()}, "norm_weight"),
        ({"residual": torch.zeros(4, 3, HIDDEN).bfloat16().transpose(0, 1)}, "contiguous"),
        ({"x": torch.zeros(9, HIDDEN).bfloat16()}, "max_bytes"),
    ],
)
def test_wrong_arguments_are_named(change, match, seed):
    with world(2) as ranks:
        boundary = ranks[0].mhc(HIDDEN)
        case = make_case(2, 3, HIDDEN, seed)
        names = ("residual", "post", "comb", "pre", "norm_weight", "eps")
        arguments = {"x": case.xs[0], **dict(zip(names, case.common(), strict=True)), **change}
        with pytest.raises(UsageError, match=match):
            boundary(**arguments)
        assert clean(ranks, 0)


def test_the_communicators_own_call(seed):
    case = make_case(1, 3, HIDDEN, seed)
    with world(1) as ranks:
        check([ranks[0].all_reduce_mhc(case.xs[0], *case.common())], case)


@pytest.mark.parametrize("protocol", ["ll", "two_shot", "auto"])
def test_all_reduce_and_reduce_scatter_through_the_world(protocol, seed):
    generator = torch.Generator().manual_seed(seed)
    with world(3) as ranks:
        xs = [torch.randn(5, 7, generator=generator).bfloat16() for _ in ranks]
        assert all(torch.equal(y, reference.all_reduce(xs)) for y in ranks.all_reduce(xs, protocol=protocol))
        parts = ranks.reduce_scatter(xs)
        assert all(torch.equal(*pair) for pair in zip(parts, reference.reduce_scatter(xs), strict=True))
        with pytest.raises(UsageError, match="protocol"):
            ranks[0].all_reduce(xs[0], protocol="ring")
        with pytest.raises(UsageError, match="scalar"):
            ranks[0].reduce_scatter(torch.tensor(1.0))


@pytest.mark.parametrize("order", ["ll", "two_shot", "both", "mixed"])
def test_R13_rows_up_to_384_growing_and_shrinking_in_one_mailbox(order, seed):
    """LL only, two-shot only, both in turn, and all mixed with all-gathers and reduce-scatters."""
    with world(max_bytes=384 * HIDDEN * 2) as ranks:
        boundaries = [comm.mhc(HIDDEN) for comm in ranks]
        calls = 0
        for i, rows in enumerate((1, 6, 48, 3, 192, 7, 384, 1, 96, 2)):
            case = make_case(4, rows, HIDDEN, seed + i)
            for protocol in ("ll", "two_shot") if order in ("both", "mixed") else (order,):
                wanted = reference.all_reduce(case.xs)
                assert all(torch.equal(y, wanted) for y in ranks.all_reduce(case.xs, protocol=protocol))
                results = [case.outputs() for _ in ranks]
                ranks.run(
                    lambda comm, case=case, results=results, protocol=protocol: boundaries[comm.rank](
                        case.xs[comm.rank], *case.common(), new_residual=results[comm.rank][0],
                        h=results[comm.rank][1], protocol=protocol,
                    )
                )  # fmt: skip
                check(results, case)
                calls += 2
            if order == "mixed":
                assert torch.equal(ranks.all_gather(case.xs)[1], torch.stack(case.xs))
                parts = ranks.reduce_scatter(case.xs)
                assert all(torch.equal(*pair) for pair in zip(parts, reference.reduce_scatter(case.xs), strict=True))
                calls += 2
        assert clean(ranks, calls)


def test_R6_500_calls_with_changed_inputs():
    index = torch.arange(3 * HIDDEN).view(3, HIDDEN)
    xs, outs = ([torch.zeros(3, HIDDEN).bfloat16() for _ in range(4)] for _ in range(2))
    with world() as ranks:
        for step in range(500):
            for rank, x in enumerate(xs):
                x.copy_(stepped(index, rank, step))
            ranks.all_reduce(xs, outs, protocol=("ll", "two_shot")[step % 2])
            wanted = reference.all_reduce(xs)
            assert all(torch.equal(out, wanted) for out in outs), step
        assert clean(ranks, 500)


def test_R13_this_fma_and_the_references_are_two_and_agree(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator, dtype=torch.int32) for _ in range(3))
    a, b, c = (values.view(torch.float32).nan_to_num(0.0, 1.0, -1.0).clamp(-1e18, 1e18) for values in (a, b, c))
    c[::2] = -(a * b)[::2]
    c[1::4] = (a * b)[1::4] * 2.0**24
    # Products on a tie of FP32, and a piece far below them that says which way: of both signs, both ways.
    a[:4], b[:4] = torch.tensor([1.0, 1.0, -1.0, -1.0]) * (1 + 2.0**-12), 1 + 2.0**-12
    c[:4] = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 2.0**-60
    seen = torch.from_numpy(fma(a.numpy(), b.numpy(), c.numpy()))
    assert torch.equal(seen, reference.fma(a, b, c))
    assert not torch.equal(seen, a * b + c)


def test_finalize_without_experts_held(seed):
    experts = make_experts(1, 4, HIDDEN, 2, seed)
    none = torch.full_like(experts.indices[0], -1)
    seen = finalize(experts.experts[0], experts.weights[0], none, experts.shared[0])
    assert torch.equal(seen, experts.shared[0])
