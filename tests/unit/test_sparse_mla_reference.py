# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA's FP32 reference, by way of the public function on CPU tensors, against attention written out in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode.kv_cache import BF16, LAYOUTS, PLAIN_FP8, record_view  # noqa: E402
from decode.reference import sparse_mla as reference  # noqa: E402
from decode.sparse_mla import ColumnSet, sparse_mla  # noqa: E402

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
