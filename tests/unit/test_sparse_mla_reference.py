# SPDX-License-Identifier: Apache-2.0
"""The FP32 reference against attention written out in numpy, the public function on CPU tensors, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode.kv_cache import BF16, LAYOUTS, PLAIN_FP8, SCALED_FP8, record_view  # noqa: E402
from decode.reference import sparse_mla as reference  # noqa: E402
from decode.sparse_mla import ColumnSet, compiled, configure, sparse_mla  # noqa: E402
from decode.sparse_mla_layout import SparseMlaConfig  # noqa: E402
from nvcomm.errors import UnsupportedError, UsageError  # noqa: E402

TOKENS, HEADS = 3, 16


def pool(layout=BF16, pages=8, block=8):
    kv = torch.full((pages, block, layout.record_bytes), 0xFF, dtype=torch.uint8)
    return record_view(kv, block, layout)


def column_set(width, layout=BF16, seed=0):
    torch.manual_seed(seed)
    view = pool(layout)
    indices = torch.stack([torch.randperm(view.num_slots)[:width] for _ in range(TOKENS)]).int()
    indices[:, ::3] = -1
    used = indices[indices >= 0].unique()
    reference.write_records(view, used, torch.randn(len(used), 512))
    return ColumnSet(view, indices)


def query(dtype=torch.bfloat16):
    torch.manual_seed(7)
    return (torch.randn(TOKENS, HEADS, 512) * 2).to(dtype)


def written_out(q, sets, sm_scale, sink=None):
    """Attention, one token, head and column at a time, in float64."""
    out, lse = np.zeros((TOKENS, HEADS, 512)), np.full((TOKENS, HEADS), np.inf)
    for token in range(TOKENS):
        keys = [
            reference.read_records(one.records, torch.tensor([slot]))[0].double().numpy()
            for one in sets
            for slot in one.indices[token].tolist()
            if 0 <= slot < one.records.num_slots
        ]
        if not keys:
            continue
        for head in range(HEADS):
            weights = np.array([np.exp(float(q[token, head].double().numpy() @ key) * sm_scale) for key in keys])
            total = weights.sum() + (0.0 if sink is None else np.exp(float(sink[head])))
            out[token, head] = sum(weight * key for weight, key in zip(weights, keys, strict=True)) / total
            lse[token, head] = np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("with_sink", [False, True])
def test_cpu_tensors_give_attention(layout, with_sink):
    sets = column_set(50, layout), column_set(30, layout, seed=1)
    q, sink = query(), torch.randn(HEADS) if with_sink else None
    out, lse = sparse_mla(q, *sets, sink=sink)
    exact, sums = written_out(q, sets, 512**-0.5, sink)
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.float().numpy(), exact, rtol=2**-7, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), sums, rtol=1e-5)


def test_fp8_query_and_scales():
    one = column_set(40, PLAIN_FP8)
    q = query(torch.float8_e4m3fn)
    out, lse = sparse_mla(q, one, q_scale=0.5, kv_scale=0.25, sm_scale=0.3)
    exact, sums = written_out(q, [one], 0.3 * 0.5 * 0.25)
    np.testing.assert_allclose(out.float().numpy(), exact * 0.25, rtol=2**-7, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), sums, rtol=1e-5)


def test_token_without_active_column():
    one = column_set(40)
    one.indices[1] = -1
    out, lse = sparse_mla(query(), one, sink=torch.zeros(HEADS))
    assert (out[1] == 0).all()
    assert (lse[1] == float("inf")).all()
    assert torch.isfinite(lse[0]).all()


def test_infinite_sinks():
    one, sink = column_set(40), torch.zeros(HEADS)
    sink[0], sink[1] = float("-inf"), float("inf")
    out, lse = sparse_mla(query(), one, sink=sink)
    plain, plain_lse = sparse_mla(query(), one)
    assert torch.equal(out[:, 0], plain[:, 0])
    assert (out[:, 1] == 0).all()
    assert torch.equal(lse, plain_lse)


def test_lengths_and_out_of_pool():
    one = column_set(40)
    one.indices[0, 5] = one.records.num_slots
    lengths = torch.tensor([128 + 10, 128 + 40, 0], dtype=torch.int32)
    bounded = replace(one, lengths=lengths, first=128)
    same = replace(one, indices=one.indices.clone())
    same.indices[0, 10:] = -1
    same.indices[2] = -1
    assert torch.equal(sparse_mla(query(), bounded)[0], sparse_mla(query(), same)[0])


def test_masked_records_are_not_read():
    """Every record that no list names is NaN; a reference that multiplied them by 0 would show it."""
    out, _ = sparse_mla(query(), column_set(40))
    assert torch.isfinite(out).all()


def test_no_tokens():
    one = column_set(40)
    out, lse = sparse_mla(query()[:0], replace(one, indices=one.indices[:0]))
    assert out.shape == (0, HEADS, 512)
    assert lse.shape == (0, HEADS)


def test_outputs_are_used():
    out, lse = torch.empty(TOKENS, HEADS, 512, dtype=torch.bfloat16), torch.empty(TOKENS, HEADS)
    got = sparse_mla(query(), column_set(40), out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": query()[:, :, :500]}, "wanted (tokens, heads, 512)"),
        ({"q": query(torch.float32)}, "q is torch.float32"),
        ({"q": query(torch.float8_e4m3fn)}, "plain_fp8"),
        ({"q": query()[:, :12]}, "12 heads"),
        ({"q": query().transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous()"),
        ({"window": replace(column_set(40), indices=column_set(40).indices.long())}, "wanted int32"),
        ({"window": replace(column_set(40), indices=column_set(40).indices[:2])}, "wanted (3, width)"),
        ({"window": replace(column_set(40), indices=column_set(40).indices.t().contiguous().t())}, "along a list"),
        ({"window": replace(column_set(40), lengths=torch.zeros(2, dtype=torch.int32))}, "window.lengths has shape"),
        ({"window": replace(column_set(40), lengths=torch.zeros(3))}, "window.lengths is torch.float32"),
        ({"topk": column_set(40, SCALED_FP8)}, "wanted one layout"),
        ({"topk": ColumnSet(pool(), torch.zeros(TOKENS, 640, dtype=torch.int32))}, "6 chunks"),
        ({"window": ColumnSet(pool(), torch.zeros(TOKENS, 0, dtype=torch.int32))}, "0 chunks"),
        ({"sink": torch.zeros(HEADS, dtype=torch.bfloat16)}, "sink is torch.bfloat16"),
        ({"sink": torch.zeros(8)}, "sink has shape"),
        ({"out": torch.zeros(TOKENS, HEADS, 512)}, "out is torch.float32"),
        ({"lse": torch.zeros(HEADS, TOKENS).t()}, "lse has strides"),
    ],
)
def test_refusals(change, reason):
    arguments = {"q": query(), "window": column_set(40), **change}
    with pytest.raises(UsageError) as caught:
        sparse_mla(**arguments)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "heads", "widths", "layout", "wide"),
    [
        (15, 16, (128, 512), PLAIN_FP8, False),
        (16, 8, (128, 512), PLAIN_FP8, True),
        (7, 32, (128, 512), PLAIN_FP8, False),
        (4, 64, (128, 512), PLAIN_FP8, True),
        (22, 16, (128, 512), BF16, False),
        (23, 16, (128, 512), BF16, True),
        (384, 16, (129, 384), PLAIN_FP8, True),
        (384, 16, (129, 512), PLAIN_FP8, False),  # too wide for either
        (12, 32, (128, 512), BF16, True),
        (384, 16, (128, 384), PLAIN_FP8, False),  # 4 CTAs of 128 do
        (384, 16, (128, 512), SCALED_FP8, False),
        (384, 16, (640, 0), PLAIN_FP8, True),
    ],
)
def test_which_kernel_runs(tokens, heads, widths, layout, wide):
    """5 CTAs of 128 columns while an H200's SMs last, then 4 of 160."""
    sets = [ColumnSet(pool(layout), torch.zeros(tokens, width, dtype=torch.int32)) for width in widths]
    topk = sets[1] if widths[1] else None
    cfg, second = configure(torch.zeros(tokens, heads, 512, dtype=torch.bfloat16), sets[0], topk, None, 132)
    assert (cfg.columns, cfg.chunks) == ((160, 4) if wide else (128, -(-widths[0] // 128) + -(-widths[1] // 128)))
    assert second == (640 if wide and topk is None else widths[0] if wide else -(-widths[0] // 128) * 128)


def test_gpu_without_clusters(monkeypatch):
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    with pytest.raises(UnsupportedError, match="this is sm_80"):
        compiled(SparseMlaConfig(PLAIN_FP8, 1))


def test_all_reasons_at_once():
    with pytest.raises(UsageError) as caught:
        sparse_mla(query(torch.float32)[:, :12], replace(column_set(40), lengths=torch.zeros(3)), sink=torch.zeros(8))
    for reason in ("q is torch.float32", "12 heads", "window.lengths is", "sink has shape"):
        assert reason in str(caught.value)
