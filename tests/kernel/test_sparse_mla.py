# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode on a GPU against the FP32 reference: every width, mask, record, head count; graph replay.

Inputs and the bar on the error: tests/sparse_mla_cases.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from decode.kv_cache import BF16, HEAD_DIM, LAYOUTS, PLAIN_FP8, SCALED_FP8, record_view  # noqa: E402
from decode.reference import sparse_mla as reference  # noqa: E402
from decode.sparse_mla import ColumnSet, sparse_mla  # noqa: E402
from decode.sparse_mla_launch import configure  # noqa: E402
from decode.sparse_mla_layout import WIDE_COLUMNS  # noqa: E402
from tests.sparse_mla_cases import Case, check, expected, make_case, make_list, write_nan  # noqa: E402

pytestmark = pytest.mark.gpu
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def run(case: Case, **outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla(
        case.q, case.window, case.topk, sm_scale=case.sm_scale, q_scale=case.q_scale, kv_scale=case.kv_scale,
        sink=case.sink, **outputs,
    )  # fmt: skip


def run_and_check(case: Case) -> None:
    tokens, heads, _ = case.q.shape
    out = torch.full((tokens, heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
    lse = torch.full((tokens, heads), float("nan"), device="cuda")
    run(case, out=out, lse=lse)
    check(case, out, lse)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize(
    "widths",
    [(128, 0), (128, 128), (128, 256), (128, 384), (128, 512), (1, 0), (127, 1), (100, 130), (256, 300), (7, 509)],
)
@pytest.mark.parametrize("sink", [False, True])
def test_widths(widths, sink):
    run_and_check(make_case(widths=widths, sink=sink))


@every_layout
@pytest.mark.parametrize("widths", [(128, 0), (0, 300), (1, 0), (100, 130), (128, 384), (127, 512)])
def test_records(layout, widths):
    run_and_check(make_case(layout, widths=widths))


@every_layout
@pytest.mark.parametrize("masked", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("tokens", [4, 24])
def test_masks(layout, masked, tokens):
    run_and_check(make_case(layout, tokens=tokens, masked=masked, sink=True))


@pytest.mark.parametrize("layout", [PLAIN_FP8, BF16], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("widths", [(128, 512), (7, 509), (200, 384), (640, 0), (570, 0), (0, 640)])
def test_wide_ctas(layout, heads, widths):
    """More clusters than 5 CTAs of 128 columns fit: 4 of 160, in which two sets may meet."""
    case = make_case(layout, tokens=40, heads=heads, widths=widths, sink=heads > 8)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert configure(case.q, case.window, case.topk, case.sink, num_sms)[0].columns == WIDE_COLUMNS
    run_and_check(case)


@every_layout
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("widths", [(128, 0), (128, 128), (128, 512)])
def test_heads(layout, heads, widths):
    run_and_check(make_case(layout, heads=heads, widths=widths, sink=True))


@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("widths", [(128, 0), (100, 130), (128, 512)])
def test_fp8_query_and_scales(heads, widths, tokens):
    case = make_case(fp8_query=True, heads=heads, widths=widths, tokens=tokens)
    run_and_check(case)
    run_and_check(replace(case, q_scale=0.37, kv_scale=1.9))


@every_layout
@pytest.mark.parametrize("blocks", [(32, 128), (256, 16)])
def test_blocks(layout, blocks):
    run_and_check(make_case(layout, blocks=blocks))


@pytest.mark.parametrize("tokens", [1, 2, 6, 12, 15, 16, 24, 47, 48, 49, 96, 192, 384])
def test_tokens(tokens):
    run_and_check(make_case(tokens=tokens, masked=0.3))


@every_layout
def test_offsets_beyond_32_bits(layout):
    """Three pages 3 GiB apart: the last one begins beyond what an unsigned 32-bit offset reaches."""
    block, stride = 256, 3 << 30
    storage = torch.empty(2 * stride + block * layout.record_bytes, dtype=torch.uint8, device="cuda")
    pages = storage.as_strided((3, block, layout.record_bytes), (stride, layout.record_bytes, 1))
    view = record_view(pages, block, layout)
    view.pages.fill_(0xFF)
    case = make_case(layout)
    case.window, case.topk = (ColumnSet(view, make_list(view, 4, width, 0.1)) for width in (128, 512))
    run_and_check(case)


def test_query_of_wider_rows():
    case = make_case(tokens=5)
    wide = torch.full((5, 24, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, :16] = case.q
    run_and_check(replace(case, q=wide[:, :16]))


@pytest.mark.parametrize("tokens", [4, 40])
def test_largest_values(tokens):
    """Equal scores and the largest E4M3 everywhere: the partial sums are as large as they can be."""
    case = make_case(tokens=tokens, masked=0.0)
    case.q.zero_()
    for one in (case.window, case.topk):
        slots = torch.arange(one.records.num_slots, device="cuda")
        reference.write_records(one.records, slots, torch.full((len(slots), HEAD_DIM), 448.0, device="cuda"))
    out, _ = run(case)
    assert (out == 448).all()


def test_token_without_active_column_is_zero():
    for sink in (False, True):
        case = make_case(sink=sink, tokens=3)
        case.window.indices[1] = -1
        case.topk.indices[1] = case.topk.records.num_slots
        out, lse = run(case)
        check(case, out, lse)
        assert (out[1] == 0).all()
        assert (lse[1] == float("inf")).all()


@every_layout
@pytest.mark.parametrize("tokens", [4, 24])
def test_slot_0_is_nan_and_masked_entries_do_not_read_it(layout, tokens):
    case = make_case(layout, tokens=tokens, masked=0.5)
    for one in (case.window, case.topk):
        one.indices[one.indices == 0] = -1
        write_nan(one.records, torch.zeros(1, device="cuda"))
    run_and_check(case)


def test_first_columns_masked():
    case = make_case(tokens=2)
    case.window.indices[0, :16] = -1
    case.window.indices[1, :] = -1
    run_and_check(case)


def test_lengths_bound_the_lists():
    case = make_case(tokens=6, masked=0.0)
    lengths = torch.tensor([0, 1, 128, 129, 300, 640], dtype=torch.int32, device="cuda")
    case.window = replace(case.window, lengths=lengths)
    case.topk = replace(case.topk, lengths=lengths, first=128)
    # The first entry past the length of token 4 is the only one that names its record.
    unnamed = (case.topk.indices == case.topk.indices[4, 300 - 128]) & (torch.arange(6, device="cuda") != 4)[:, None]
    case.topk.indices[unnamed] = -1
    bad = torch.full((1, HEAD_DIM), float("nan"), device="cuda")
    reference.write_records(case.topk.records, case.topk.indices[4, 300 - 128 :][:1], bad)
    run_and_check(case)


def test_both_sets_from_one_pool():
    case = make_case()
    both = torch.cat([case.window.indices, make_list(case.window.records, 4, 300, 0.1)], dim=1)
    case.window, case.topk = (ColumnSet(case.window.records, part) for part in both.split([128, 300], dim=1))
    run_and_check(case)


def test_extreme_values():
    case = make_case(tokens=4, masked=0.1, sink=True)
    case.q[0] *= 1000.0
    case.q[1] *= 1e-30
    case.q[2, :, ::2] *= 1e6
    case.q[3] = 0
    case.sink[0], case.sink[1], case.sink[2] = float("-inf"), float("inf"), 1e4
    out, _ = run(case)
    assert not out.isnan().any()
    assert (out[:, 1] == 0).all()
    exact, _ = expected(case)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)


def test_scaled_records_of_very_different_size():
    case = make_case(SCALED_FP8, widths=(128, 128), masked=0.1)
    for one in (case.window, case.topk):
        slots = one.indices[(one.indices >= 0) & (one.indices < one.records.num_slots)].unique()
        values = torch.randn(len(slots), HEAD_DIM, device="cuda") * torch.exp2(
            torch.randint(-12, 6, (len(slots), 8), device="cuda")
        ).repeat_interleave(64, dim=1)
        reference.write_records(one.records, slots, values)
    run_and_check(case)


@every_layout
def test_nan_in_an_active_record_is_not_hidden(layout):
    case = make_case(layout, masked=0.0)
    slot = case.topk.indices[2, 77].clone()
    write_nan(case.topk.records, slot[None])
    out, _ = run(case)
    assert out[2].isnan().all()
    named = (case.topk.indices == slot).any(dim=1)
    assert torch.equal(out.isnan().flatten(1).any(dim=1), named)


@every_layout
@pytest.mark.parametrize("tokens", [6, 24])
def test_graph_replays_with_changed_lists(layout, tokens):
    case = make_case(layout, tokens=tokens, masked=0.3, sink=True)
    lengths = torch.empty(tokens, dtype=torch.int32, device="cuda")
    case.window = replace(case.window, lengths=lengths)
    case.topk = replace(case.topk, lengths=lengths, first=128)
    out = torch.empty(tokens, 16, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(tokens, 16, device="cuda")
    run(case, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, out=out, lse=lse)
        run(case, out=out, lse=lse)
    for _ in range(5):
        for one in (case.window, case.topk):
            one.indices.copy_(make_list(one.records, tokens, one.indices.shape[1], 0.3))
        lengths.random_(0, 641)
        case.q.normal_()
        case.sink.normal_()
        out.fill_(float("nan"))
        graph.replay()
        check(case, out, lse)


@pytest.mark.parametrize("tokens", [1, 6, 48])
def test_chain_of_calls_reads_what_the_call_before_wrote(tokens):
    """Each call's query is the output of the one before, which starts it early (PDL): as if each had waited."""
    case, calls = make_case(tokens=tokens, masked=0.3), 20
    links = torch.full((calls + 1, *case.q.shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    links[0] = case.q
    wanted = links.clone()
    for i in range(calls):
        run(replace(case, q=wanted[i], sm_scale=1.0), out=wanted[i + 1])
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(replace(case, q=links[i], sm_scale=1.0), out=links[i + 1])
    for _ in range(20):
        links[1:].fill_(float("nan"))
        graph.replay()
        assert torch.equal(links, wanted)


@pytest.mark.parametrize("tokens", [12, 48])
def test_results_do_not_change_from_call_to_call(tokens):
    case = make_case(tokens=tokens)
    first, _ = run(case)
    for _ in range(20):
        again, _ = run(case)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


def test_nothing_is_written_around_the_output():
    case = make_case(tokens=3)
    guard = torch.full((5, 16, HEAD_DIM), 7.0, dtype=torch.bfloat16, device="cuda")
    run(case, out=guard[1:4])
    assert (guard[0] == 7).all()
    assert (guard[4] == 7).all()
