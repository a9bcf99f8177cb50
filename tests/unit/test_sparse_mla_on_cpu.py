# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA's PTX, run on the CPU: every kind of record, masks, sinks, head counts, against the reference.

What only a GPU can show (memory order, programmatic dependent launch, speed) is tested under tests/kernel.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from decode.kv_cache import BF16, HEAD_DIM, PLAIN_FP8, SCALED_FP8  # noqa: E402
from decode.reference import sparse_mla as reference  # noqa: E402
from decode.sparse_mla_kernel import SparseMlaKernel, fake_arguments  # noqa: E402
from decode.sparse_mla_launch import configure, work_of  # noqa: E402
from decode.sparse_mla_layout import HEADS, THREADS, WIDE_COLUMNS, SparseMlaConfig  # noqa: E402
from nvcomm import jit  # noqa: E402
from tests.emulator.machine import Machine  # noqa: E402
from tests.emulator.memory import Memory  # noqa: E402
from tests.emulator.program import Launch, Program  # noqa: E402
from tests.emulator.values import float_bits  # noqa: E402
from tests.sparse_mla_cases import check, make_case  # noqa: E402


@functools.cache
def program(cfg: SparseMlaConfig) -> Program:
    built = jit.artifacts(SparseMlaKernel(cfg), *fake_arguments(), make_fake_stream(), arch="sm_90a")
    return Program(built.ptx)


def run(case, seed, ptx=None, page_stride=None, num_sms=132):
    """As `decode.sparse_mla_launch.launch`, with copies of the tensors in the memory of the machine.

    `page_stride`: where pages lie this far apart; then a pool's one page is its page 5, and the others lie nowhere.
    `num_sms`: with 0 every call that can has CTAs of 160 columns.
    """
    tokens, heads, _ = case.q.shape
    memory, places = Memory(seed), {}

    def place(tensor):
        """Address of a tensor's first byte in a copy of its whole storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = memory.allocate(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return places[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()

    def lists(one, told):
        """The addresses of a set's copies, in place of the tensors' own."""
        pool = place(one.records.pages)
        told = told._replace(indices=place(one.indices), lengths=place(one.lengths) if told.lengths else 0, pool=pool)
        if page_stride:
            far = 5 * one.records.block
            indices = memory.allocate(torch.where(one.indices < 0, -1, one.indices + far).numpy())
            told = told._replace(
                indices=indices, indices_stride=one.indices.shape[1] * 4, pool=(pool - 5 * page_stride) % 2**64,
                page_stride=page_stride, num_slots=told.num_slots + far,
            )  # fmt: skip
        return told

    cfg, window_columns = configure(case.q, case.window, case.topk, case.sink, num_sms)
    out = memory.allocate(np.full(tokens * heads * HEAD_DIM * 2, 0xFF, np.uint8))
    lse = memory.allocate(np.full(tokens * heads * 4, 0xFF, np.uint8))
    told = work_of(
        case.q, case.window, case.topk, case.sink, torch.empty(0), torch.empty(0), window_columns,
        case.sm_scale * case.q_scale * case.kv_scale, case.kv_scale,
    )  # fmt: skip
    work = told._replace(
        query=place(case.q), out=out, lse=lse, sink=place(case.sink) if told.sink else 0,
        window=lists(case.window, told.window), topk=lists(case.topk or case.window, told.topk),
        score_scale=float_bits(told.score_scale), out_scale=float_bits(told.out_scale),
    )  # fmt: skip
    grid = (cfg.chunks, -(-heads // HEADS), tokens)
    launch = Launch(ptx or program(cfg), work.numbers(), grid, THREADS, cfg.chunks, cfg.shared_bytes)
    Machine(memory, seed).run([[launch]])
    size = tokens * heads
    result = torch.frombuffer(bytearray(memory.bytes_at(out, size * HEAD_DIM * 2)), dtype=torch.bfloat16)
    sums = torch.frombuffer(bytearray(memory.bytes_at(lse, size * 4)), dtype=torch.float32)
    return result.view(tokens, heads, HEAD_DIM), sums.view(tokens, heads)


def small_case(**options):
    return make_case(**{"device": "cpu", "tokens": 1, "num_slots": 1024, **options})


@pytest.fixture(autouse=True)
def _seeded(seed):
    torch.manual_seed(seed)


@pytest.mark.parametrize("layout", [PLAIN_FP8, SCALED_FP8, BF16], ids=lambda layout: layout.name)
@pytest.mark.parametrize("widths", [(128, 0), (100, 130), (128, 512)])
def test_records(layout, widths, seed):
    case = small_case(layout=layout, widths=widths, sink=widths[1] > 0)
    check(case, *run(case, seed))


@pytest.mark.parametrize("layout", [PLAIN_FP8, SCALED_FP8, BF16], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("heads", "widths"), [(8, (128, 0)), (8, (128, 90)), (8, (128, 512)), (32, (128, 90))])
def test_heads(layout, heads, widths, seed):
    case = small_case(layout=layout, heads=heads, widths=widths, sink=True)
    check(case, *run(case, seed))


def test_fp8_query_and_scales(seed):
    case = replace(small_case(fp8_query=True, widths=(128, 200)), q_scale=0.37, kv_scale=1.9)
    check(case, *run(case, seed))


@pytest.mark.parametrize("widths", [(1, 0), (7, 200), (128, 380)])
def test_widths_and_masks(widths, seed):
    case = small_case(widths=widths, masked=0.6, tokens=2)
    check(case, *run(case, seed))


@pytest.mark.parametrize("layout", [PLAIN_FP8, SCALED_FP8, BF16], ids=lambda layout: layout.name)
@pytest.mark.parametrize("page_stride", [(1 << 31) - 16, 3 << 30, 5 << 40])
def test_pages_far_apart(layout, page_stride, seed):
    """Byte offsets have 64 bits: cut to 32, they would lie outside of every allocation."""
    case = small_case(layout=layout, widths=(128, 7), num_slots=256, blocks=(256, 256))
    check(case, *run(case, seed, page_stride=page_stride))


@pytest.mark.parametrize("layout", [PLAIN_FP8, BF16], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("widths", [(128, 512), (200, 384), (570, 0), (0, 640)])
def test_wide_ctas(layout, heads, widths, seed):
    """4 CTAs of 160 columns, in which two sets may meet."""
    case = small_case(layout=layout, widths=widths, heads=heads, sink=heads == 8, masked=0.3)
    assert configure(case.q, case.window, case.topk, case.sink, 0)[0].columns == WIDE_COLUMNS
    check(case, *run(case, seed, num_sms=0))


def test_wide_ctas_fp8_query_lengths_and_a_token_without_columns(seed):
    case = small_case(tokens=3, fp8_query=True, masked=0.0)
    lengths = torch.tensor([0, 129, 400], dtype=torch.int32)
    case.window = replace(case.window, lengths=lengths)
    case.topk = replace(case.topk, lengths=lengths, first=128)
    out, lse = run(case, seed, num_sms=0)
    check(case, out, lse)
    assert (out[0] == 0).all()
    assert (lse[0] == float("inf")).all()


def test_window_without_columns(seed):
    case = small_case(widths=(0, 130))
    check(case, *run(case, seed))


def test_tokens_without_active_columns_and_lengths(seed):
    case = small_case(tokens=4, masked=0.0, widths=(128, 130), sink=True)
    case.window.indices[0], case.topk.indices[0] = -1, case.topk.records.num_slots
    lengths = torch.tensor([258, 0, 100, 200], dtype=torch.int32)
    case.window = replace(case.window, lengths=lengths)
    case.topk = replace(case.topk, lengths=lengths, first=128)
    out, lse = run(case, seed)
    check(case, out, lse)
    assert (out[:2] == 0).all()
    assert (lse[:2] == float("inf")).all()


@pytest.mark.parametrize("num_sms", [132, 0])
def test_largest_values(num_sms, seed):
    case = small_case(masked=0.0, widths=(128, 512))
    case.q.zero_()
    for one in (case.window, case.topk):
        slots = torch.arange(one.records.num_slots)
        reference.write_records(one.records, slots, torch.full((len(slots), HEAD_DIM), 448.0))
    assert (run(case, seed, num_sms=num_sms)[0] == 448).all()


def test_scaled_records_of_very_different_size(seed):
    case = small_case(layout=SCALED_FP8, widths=(128, 128), masked=0.1)
    for one in (case.window, case.topk):
        slots = one.indices[(one.indices >= 0) & (one.indices < one.records.num_slots)].unique()
        powers = torch.exp2(torch.randint(-12, 6, (len(slots), 8))).repeat_interleave(64, dim=1)
        reference.write_records(one.records, slots, torch.randn(len(slots), HEAD_DIM) * powers)
    check(case, *run(case, seed))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cp.async.wait_group 0;", ""),  # rows used before they have come
        (", 0, 12576;", ", 0, 12816;"),  # columns not paired
        ("ex2.approx", "lg2.approx"),
        ("], 1;", "], 2;"),  # mbarriers that nobody completes
    ],
)
def test_a_changed_instruction_is_noticed(old, new, seed):
    case = small_case(widths=(128, 128))
    cfg = SparseMlaConfig(PLAIN_FP8, 2)
    ptx = jit.artifacts(SparseMlaKernel(cfg), *fake_arguments(), make_fake_stream(), arch="sm_90a").ptx
    assert old in ptx
    with pytest.raises(AssertionError):
        check(case, *run(case, seed, Program(ptx.replace(old, new))))


def test_reading_past_the_query_is_noticed(seed):
    case = small_case(widths=(128, 0), heads=8)
    with pytest.raises(AssertionError, match="outside of every allocation"):
        run(case, seed, program(SparseMlaConfig(PLAIN_FP8, 1)))
