# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA refuses, all reasons at once, and which kernel a call takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode.kv_cache import BF16, PLAIN_FP8, SCALED_FP8, RecordLayout, RecordView, record_view  # noqa: E402
from decode.sparse_mla import ColumnSet, sparse_mla  # noqa: E402
from decode.sparse_mla_launch import compiled, configure  # noqa: E402
from decode.sparse_mla_layout import SparseMlaConfig  # noqa: E402
from nvcomm.errors import UnsupportedError, UsageError  # noqa: E402

TOKENS, HEADS = 3, 16


def pool(layout=BF16, block=8, device="cpu"):
    kv = torch.zeros((8, block, layout.record_bytes), dtype=torch.uint8, device=device)
    return record_view(kv, block, layout)


def column_set(width, layout=BF16, **changes):
    return replace(ColumnSet(pool(layout), torch.zeros(TOKENS, width, dtype=torch.int32)), **changes)


def huge_pages(layout, block):
    """A pool of one page that is named, not there."""
    one_byte = torch.zeros(1, dtype=torch.uint8)
    return RecordView(layout, block, one_byte.expand(1, block * layout.record_bytes))


def query(dtype=torch.bfloat16):
    return torch.ones(TOKENS, HEADS, 512).to(dtype)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": query()[:, :, :500]}, "wanted (tokens, heads, 512)"),
        ({"q": query(torch.float32)}, "q is torch.float32"),
        ({"q": query(torch.float8_e4m3fn)}, "plain_fp8"),
        ({"q": query()[:, :12]}, "12 heads"),
        ({"q": query().transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous()"),
        ({"window": column_set(40, indices=torch.zeros(TOKENS, 40, dtype=torch.int64))}, "wanted int32"),
        ({"window": column_set(40, indices=torch.zeros(2, 40, dtype=torch.int32))}, "wanted (3, width)"),
        ({"window": column_set(40, indices=torch.zeros(40, TOKENS, dtype=torch.int32).t())}, "along a list"),
        ({"window": column_set(40, lengths=torch.zeros(2, dtype=torch.int32))}, "window.lengths has shape"),
        ({"window": column_set(40, lengths=torch.zeros(3))}, "window.lengths is torch.float32"),
        ({"topk": column_set(40, SCALED_FP8)}, "wanted one layout"),
        ({"topk": ColumnSet(pool(), torch.zeros(TOKENS, 640, dtype=torch.int32))}, "6 chunks"),
        ({"window": ColumnSet(pool(), torch.zeros(TOKENS, 0, dtype=torch.int32))}, "0 chunks"),
        ({"q": None}, "q is a NoneType"),
        ({"q": np.zeros((3, 16, 512))}, "q is a ndarray"),
        ({"q": query()[0]}, "wanted (tokens, heads, 512)"),
        ({"q": query()[:, :0]}, "0 heads"),
        ({"q": query().expand(1, 3, 16, 512)}, "wanted (tokens, heads, 512)"),
        ({"q": query().to("meta")}, "q is on meta"),
        ({"q": query().requires_grad_()}, "q requires grad"),
        ({"q": torch.zeros(TOKENS, HEADS * 512 + 4).bfloat16()[:, 4:].view(TOKENS, HEADS, 512)}, "16-byte aligned"),
        ({"q": torch.zeros(TOKENS, HEADS * 512 + 4).bfloat16()[:, :-4].view(TOKENS, HEADS, 512)}, "in every token"),
        ({"q": torch.zeros(1, 8, 512).bfloat16().expand(65536, 8, 512)}, "at most 65535"),
        ({"window": None}, "window is a NoneType"),
        ({"topk": torch.zeros(3)}, "topk is a Tensor, wanted a ColumnSet"),
        ({"window": column_set(40, records=torch.zeros(8, 8, 1024))}, "wanted what record_view returns"),
        ({"window": column_set(40, records=pool(device="meta"))}, "window.records is on meta"),
        ({"window": column_set(40, indices=[[0]])}, "window.indices is a list"),
        ({"window": column_set(40, indices=torch.zeros(TOKENS, dtype=torch.int32))}, "wanted (3, width)"),
        ({"window": column_set(40, lengths=[1, 2, 3])}, "window.lengths is a list"),
        ({"window": column_set(40, lengths=torch.zeros(TOKENS, dtype=torch.int64))}, "wanted torch.int32"),
        ({"window": column_set(40, first=1.5)}, "window.first is 1.5"),
        ({"window": column_set(40, first=-1)}, "window.first is -1"),
        ({"window": column_set(40, first=2**31 - 640)}, "window.first is"),  # its last place would not fit
        ({"sm_scale": None}, "sm_scale is None, wanted a finite number"),
        ({"kv_scale": float("inf")}, "kv_scale is inf"),
        ({"kv_scale": float("nan")}, "kv_scale is nan"),
        ({"q_scale": torch.ones(HEADS)}, "q_scale is a Tensor"),
        ({"sink": [0.0] * HEADS}, "sink is a list"),
        ({"sink": torch.zeros(HEADS, dtype=torch.bfloat16)}, "sink is torch.bfloat16"),
        ({"sink": torch.zeros(8)}, "sink has shape"),
        ({"out": torch.zeros(TOKENS, HEADS, 512)}, "out is torch.float32"),
        ({"out": torch.zeros(TOKENS * HEADS * 512 + 1).bfloat16()[1:].view(TOKENS, HEADS, 512)}, "out is not 16-byte"),
        ({"lse": torch.zeros(HEADS, TOKENS).t()}, "lse has strides"),
        ({"lse": torch.zeros(TOKENS, HEADS, device="meta")}, "lse is on meta"),
    ],
)
def test_refusals(change, reason):
    arguments = {"q": query(), "window": column_set(40), **change}
    with pytest.raises(UsageError) as caught:
        sparse_mla(**arguments)
    assert reason in str(caught.value)


def test_records_of_a_layout_that_no_kernel_reads():
    layout = RecordLayout("inline", 512, 16, 512, ("uint8",))
    with pytest.raises(UsageError, match="wanted one of the layouts plain_fp8, bf16, scaled_fp8"):
        sparse_mla(query(), ColumnSet(pool(layout), torch.zeros(TOKENS, 40, dtype=torch.int32)))


def test_scales_beyond_31_bits_of_their_page():
    """The kernel's one offset of 32 bits is that of a scale in its page; values and pages may lie further away."""
    indices = torch.full((TOKENS, 40), -1, dtype=torch.int32)
    with pytest.raises(
        UsageError, match="pages of 2449473536 bytes, and offsets of scales in a page end at 2147483647"
    ):
        sparse_mla(query(), ColumnSet(huge_pages(SCALED_FP8, 1 << 22), indices))
    for records in (huge_pages(SCALED_FP8, 1 << 21), huge_pages(PLAIN_FP8, 1 << 23)):
        assert torch.equal(sparse_mla(query(), ColumnSet(records, indices))[0], torch.zeros(TOKENS, HEADS, 512))


def test_no_gradient_is_asked_for():
    with torch.no_grad():
        out, _ = sparse_mla(query().requires_grad_(), column_set(40))
    assert not out.requires_grad


def test_all_reasons_at_once():
    with pytest.raises(UsageError) as caught:
        sparse_mla(query(torch.float32)[:, :12], column_set(40, lengths=torch.zeros(3)), sink=torch.zeros(8))
    for reason in ("q is torch.float32", "12 heads", "window.lengths is", "sink has shape"):
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
        compiled.__wrapped__(SparseMlaConfig(PLAIN_FP8, 1))
