# SPDX-License-Identifier: Apache-2.0
"""The launches of the decode kernels on a machine without a driver: they get as far as loading the kernel.

By then the compiled function has checked the number and the types of all that it was handed.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from decode import sparse_mla_launch, topk
from decode.topk_config import TopkConfig
from nvcomm.errors import CudaError
from tests.sparse_mla_cases import make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/kernel launch for real")


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(sparse_mla_launch, "num_sms", lambda device: 132)


def launch_topk():
    logits, lengths = torch.zeros(3, 4096, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    topk.launch(TopkConfig(512, 8, batches=1, threads=512), logits, lengths, torch.zeros(3, 512, dtype=torch.int32))


def launch_sparse_mla(*, two_sets: bool, **changes):
    case = make_case(tokens=3, widths=(128, 100 if two_sets else 0), sink=two_sets, device="cpu", num_slots=256)
    out, lse = torch.zeros(case.q.shape, dtype=torch.bfloat16), torch.zeros(case.q.shape[:2])
    arguments = {"score_scale": 1, "out_scale": 1.0, "sink": case.sink, "out": out, "lse": lse} | changes
    sparse_mla_launch.launch(case.q, case.window, case.topk, **arguments)


def test_topk():
    with pytest.raises(CudaError, match="loading the kernel"):
        launch_topk()


def test_the_numbers_of_a_topk(monkeypatch):
    """Strides are those of the tensors, whose rows may lie apart."""
    handed = {}
    monkeypatch.setattr(topk, "compiled", lambda config: lambda *numbers: handed.update({config: numbers}))
    logits, lengths = torch.zeros(6, 5000, dtype=torch.bfloat16)[:, :4096], torch.zeros(3, dtype=torch.int32)
    out, config = torch.zeros(6, 3000, dtype=torch.int32)[:, 8:2056], TopkConfig(2048, 8, mode="blocks")
    topk.launch(config, logits, lengths, out, 2)
    addresses = (one.data_ptr() for one in (logits, lengths, out))
    assert handed == {config: (*addresses, 10_000, 12_000, 6, 4096, 2, 0)}


def test_the_numbers_of_a_sparse_mla():
    """Both lists and their lengths in one tensor each, and queries that are part of wider rows."""
    case = make_case(tokens=3, widths=(128, 100), device="cpu", num_slots=256, blocks=(32, 128))
    lists, lengths = torch.zeros(3, 640, dtype=torch.int32), torch.full((3,), 200, dtype=torch.int32)
    window = replace(case.window, indices=lists[:, :128], lengths=lengths)
    chosen = replace(case.topk, indices=lists[:, 128:228], lengths=lengths, first=128)
    q, out = torch.zeros(3, 17, 512, dtype=torch.bfloat16)[:, :16], torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    work = sparse_mla_launch.work_of(q, window, chosen, None, out, lengths, 128, 0.5, 2.0)
    assert (work.query, work.query_stride, work.heads, work.window_columns) == (q.data_ptr(), 17 * 512 * 2, 16, 128)
    assert (work.out, work.lse, work.sink) == (out.data_ptr(), lengths.data_ptr(), 0)
    assert (work.score_scale, work.out_scale) == (0.5 * sparse_mla_launch.LOG2_E, 2.0)
    for one, columns, first, shift in ((work.window, window, 0, 5), (work.topk, chosen, 128, 7)):
        indices, pages = columns.indices, columns.records.pages
        assert (one.indices, one.indices_stride, one.width) == (indices.data_ptr(), 2560, indices.shape[1])
        assert (one.lengths, one.first, one.shift, one.num_slots) == (lengths.data_ptr(), first, shift, 256)
        assert (one.pool, one.page_stride) == (pages.data_ptr(), pages.stride(0))
    assert work.window.pool != work.topk.pool


@pytest.mark.parametrize("two_sets", [False, True])
def test_sparse_mla(two_sets):
    with pytest.raises(CudaError, match="loading the kernel"):
        launch_sparse_mla(two_sets=two_sets)


def test_what_does_not_fit_is_refused_before_that(monkeypatch):
    """Negative control: an argument of another type, and one too few."""
    with pytest.raises(TypeError, match="Mismatched type"):
        launch_sparse_mla(two_sets=False, lse=SimpleNamespace(data_ptr=lambda: 0.5))
    fitting = sparse_mla_launch.work_of
    monkeypatch.setattr(sparse_mla_launch, "work_of", lambda *args: fitting(*args)[:-1])
    with pytest.raises(ValueError, match="Mismatched tuple size"):
        launch_sparse_mla(two_sets=False)
