# SPDX-License-Identifier: Apache-2.0
"""The fused sublayer boundary in the virtual world: residual streams bit for bit, the normed input within one ULP."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from nvcomm.errors import CollectiveMismatchError, PeerTimeoutError, UsageError
from nvcomm.mailbox import EMPTY, ESCAPE
from tests.kernel import own_publisher
from tests.kernel.test_all_gather import assert_clean
from tests.kernel.worlds import assert_gathered
from tests.mhc_cases import Case, check, make_case, make_experts, stepped

pytestmark = pytest.mark.gpu
HIDDEN = 5120
ROWS = (1, 6, 48, 3, 192, 7, 384, 1)
PROTOCOLS = ("ll", "two_shot")


@pytest.fixture(scope="module", params=["safe", "early", "off"])
def world4(request):
    with nvcomm.virtual_world(4, pdl=request.param, timeout_s=5, max_bytes=384 * HIDDEN * 2) as world:
        yield world
        assert_clean(world)


@pytest.fixture(scope="module")
def boundaries(world4):
    return [comm.mhc(HIDDEN, top_k=6, parts=("fused", "finalize", "publish", "collect")) for comm in world4]


def run(world, case: Case, call) -> None:
    """Calls every rank with room for its results, and checks what is there afterwards."""
    results = [case.outputs() for _ in world]

    def one(comm):
        new_residual, h = results[comm.rank]
        call(comm.rank, new_residual, h)

    world.run(one)
    torch.cuda.synchronize()
    for comm in world:
        comm.check()
    check(results, case)


def run_all_parts(world, hidden: int, all_rows: tuple[int, ...]) -> None:
    """Every kernel of the boundary, one after the other, for each number of rows."""
    boundaries = [comm.mhc(hidden, top_k=2, parts=("fused", "finalize", "publish", "collect")) for comm in world]
    for i, rows in enumerate(all_rows):
        case = make_case(len(world), rows, hidden, i, "cuda", collapse=i % 3 != 1)
        experts = make_experts(len(world), rows, hidden, 2, i, "cuda")
        folded = make_case(len(world), rows, hidden, i, "cuda")
        folded.xs = experts.contributions()
        for protocol in PROTOCOLS:

            def fused(rank, new_residual, h, case=case, protocol=protocol):
                boundaries[rank](case.xs[rank], *case.common(), new_residual=new_residual, h=h, protocol=protocol)

            def finalize(rank, new_residual, h, case=folded, experts=experts, protocol=protocol):
                boundaries[rank].finalize(
                    *experts.of(rank), *case.common(), new_residual=new_residual, h=h, protocol=protocol
                )

            run(world, case, fused)
            run(world, folded, finalize)

        def apart(rank, new_residual, h, case=case):
            boundaries[rank].publish(case.xs[rank])
            boundaries[rank].collect(*case.common(), new_residual=new_residual, h=h)

        run(world, case, apart)


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("order", ["ll", "two_shot", "both"])
def test_rows_growing_and_shrinking_in_one_mailbox(world4, boundaries, order, collapse):
    for i, rows in enumerate(ROWS):
        case = make_case(4, rows, HIDDEN, i, "cuda", collapse=collapse)
        for protocol in PROTOCOLS if order == "both" else (order,):

            def call(rank, new_residual, h, case=case, protocol=protocol):
                boundaries[rank](case.xs[rank], *case.common(), new_residual=new_residual, h=h, protocol=protocol)

            run(world4, case, call)
        if order == "both":
            assert_gathered(world4.all_gather(case.xs), case.xs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_finalize_folds_the_experts_in(world4, boundaries, protocol, shared):
    for i, rows in enumerate((1, 6, 48, 100, 2)):
        experts = make_experts(4, rows, HIDDEN, 6, i, "cuda", shared=shared)
        case = make_case(4, rows, HIDDEN, i, "cuda")
        case.xs = experts.contributions()

        def call(rank, new_residual, h, case=case, experts=experts):
            boundaries[rank].finalize(
                *experts.of(rank), *case.common(), new_residual=new_residual, h=h, protocol=protocol
            )

        run(world4, case, call)


def test_publish_and_collect_apart(world4, boundaries):
    for i, rows in enumerate((1, 48, 6, 384, 2)):
        case = make_case(4, rows, HIDDEN, i, "cuda", collapse=i % 2 == 0)

        def call(rank, new_residual, h, case=case):
            boundaries[rank].publish(case.xs[rank])
            boundaries[rank].collect(*case.common(), new_residual=new_residual, h=h)

        run(world4, case, call)


def test_a_kernel_of_the_callers_own_publishes_to_the_target(world4, boundaries):
    kernel = own_publisher.load(4)
    for i, rows in enumerate((1, 48, 6, 2)):
        case = make_case(4, rows, HIDDEN, i, "cuda")
        for rank, word in enumerate((EMPTY, ESCAPE)):  # a NaN that may not travel as it is
            case.xs[rank].view(torch.int32)[0, 5] = word - 2**32

        def call(rank, new_residual, h, case=case, rows=rows):
            x, target = case.xs[rank], boundaries[rank].publish_target(rows)
            own_publisher.publish(kernel, x.data_ptr(), x.nbytes, target, torch.cuda.current_stream().cuda_stream)
            boundaries[rank].collect(*case.common(), new_residual=new_residual, h=h)

        run(world4, case, call)


@pytest.mark.parametrize("apart", [False, True])
def test_R1_a_slow_producer_right_before(world4, boundaries, apart):
    """A kernel that writes everything late, right before: nothing may be read ahead of it but the norm's weight."""
    for i in range(4):
        case = make_case(4, 6, HIDDEN, i, "cuda")
        late = [case.xs, case.residual, case.post, case.comb, case.pre]
        xs = [torch.full_like(x, float("nan")) for x in case.xs]
        own = [[torch.full_like(t, float("nan")) for t in late[1:]] for _ in range(4)]

        def call(rank, new_residual, h, case=case, xs=xs, own=own, late=late):
            torch.cuda._sleep(300_000 * (rank + 1))
            xs[rank].copy_(case.xs[rank])
            for mine, value in zip(own[rank], late[1:], strict=True):
                mine.copy_(value)
            arguments = (*own[rank], case.norm_weight, 1e-20)
            if apart:
                boundaries[rank].publish(xs[rank])
                boundaries[rank].collect(*arguments, new_residual=new_residual, h=h)
            else:
                boundaries[rank](xs[rank], *arguments, new_residual=new_residual, h=h)

        run(world4, case, call)


def test_R6_residual_streams_updated_in_place_in_a_graph_replayed_with_changed_inputs(world4, boundaries):
    """A chain of boundaries as a decode step has it: 500 replays, streams carried on, each rank's equal at the end."""
    case = make_case(4, 6, HIDDEN, 9, "cuda")
    own = [case.residual.clone() for _ in range(4)]
    h = [torch.empty_like(x) for x in case.xs]
    counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(4)]
    index = torch.arange(6 * HIDDEN, device="cuda").view(6, HIDDEN)
    post, comb = case.post * 0.5, case.comb * 0.15  # streams that neither grow nor vanish
    torch.cuda.synchronize()
    graphs = []
    for rank, comm in enumerate(world4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
            counters[rank].add_(1)
            case.xs[rank].copy_(stepped(index, rank, counters[rank]))
            for protocol in PROTOCOLS:
                boundaries[rank](
                    case.xs[rank], own[rank], post, comb, case.pre, case.norm_weight, 1e-20,
                    new_residual=own[rank], h=h[rank], protocol=protocol,
                )  # fmt: skip
        graphs.append(graph)
    replays = 500
    for _ in range(replays):
        for rank, comm in enumerate(world4):
            with torch.cuda.stream(comm.stream):
                graphs[rank].replay()
    torch.cuda.synchronize()
    want = Case([], case.residual, post, comb, case.pre, case.norm_weight)
    for call in range(2 * replays):
        want.xs = [stepped(index, rank, call // 2 + 1) for rank in range(4)]
        if call < 2 * replays - 1:
            want.residual = want.wanted()[0]
    check([(own[rank], h[rank]) for rank in range(4)], want)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("transport", ["auto", "delayed"])
def test_device_checks_and_late_delivery_change_nothing(checks, transport, monkeypatch):
    """R7 and R11 on; every word on its own, late and in any order; both at once."""
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", checks)
    with nvcomm.virtual_world(4, timeout_s=20, max_bytes=1 << 17, transport=transport) as world:
        run_all_parts(world, 1280, (1, 12, 3, 40, 2))
        assert_clean(world)


def test_R11_a_different_call_is_an_error_that_names_both(monkeypatch):
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    with nvcomm.virtual_world(2, timeout_s=1.0, max_bytes=1 << 16) as world:
        boundaries = [comm.mhc(1024) for comm in world]
        case = make_case(2, 3, 1024, 1, "cuda")
        results = [case.outputs() for _ in world]
        world.run(
            lambda comm: boundaries[comm.rank](
                case.xs[comm.rank], *case.common(), new_residual=results[comm.rank][0], h=results[comm.rank][1],
                protocol=PROTOCOLS[comm.rank],
            )
        )  # fmt: skip
        torch.cuda.synchronize()
        with pytest.raises(CollectiveMismatchError, match="two_shot"):
            world[0].check()


@pytest.mark.parametrize(
    ("world_size", "hidden", "streams"),
    [(1, 64, 4), (2, 1024, 2), (3, 4096, 4), (5, 7168, 4), (8, 5120, 4), (4, 320, 1)],
)
def test_other_shapes_and_worlds(world_size, hidden, streams):
    with nvcomm.virtual_world(world_size, timeout_s=5, max_bytes=16 * hidden * 2, device_share=1.0) as world:
        boundaries = [comm.mhc(hidden, num_streams=streams) for comm in world]
        for i, rows in enumerate((1, 16, 5)):
            case = make_case(world_size, rows, hidden, i, "cuda", streams=streams)
            for protocol in PROTOCOLS:

                def call(rank, new_residual, h, case=case, protocol=protocol):
                    boundaries[rank](case.xs[rank], *case.common(), new_residual=new_residual, h=h, protocol=protocol)

                run(world, case, call)
        assert_clean(world)


def test_halves_have_to_pair_up(world4, boundaries):
    case = make_case(4, 3, HIDDEN, 1, "cuda")
    world4.run(lambda comm: boundaries[comm.rank].publish(case.xs[comm.rank]))
    for call in (lambda: world4[0].all_gather(case.xs[0]), lambda: boundaries[0].publish(case.xs[0])):
        with pytest.raises(UsageError, match="has to be next"):
            call()

    def collect(rank, new_residual, h):
        boundaries[rank].collect(*case.common(), new_residual=new_residual, h=h)

    run(world4, case, collect)
    with pytest.raises(UsageError, match="nothing was published"):
        boundaries[0].collect(*case.common())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_R10_a_rank_that_does_not_come_is_named_and_the_world_comes_back(protocol):
    with nvcomm.virtual_world(3, timeout_s=0.2, max_bytes=1 << 17) as world:
        boundaries = [comm.mhc(1024) for comm in world]
        case = make_case(3, 5, 1024, 1, "cuda")
        results = [case.outputs() for _ in range(3)]

        def all_but_one(comm):
            if comm.rank != 1:
                out = results[comm.rank]
                boundaries[comm.rank](
                    case.xs[comm.rank], *case.common(), new_residual=out[0], h=out[1], protocol=protocol
                )

        world.run(all_but_one)
        torch.cuda.synchronize()
        for rank in (0, 2):
            with pytest.raises(PeerTimeoutError) as raised:
                world[rank].check()
            assert raised.value.src_rank == 1
            assert all(bool(out.isnan().all()) for out in results[rank])
        world.reset()

        def call(rank, new_residual, h):
            boundaries[rank](case.xs[rank], *case.common(), new_residual=new_residual, h=h, protocol=protocol)

        run(world, case, call)
