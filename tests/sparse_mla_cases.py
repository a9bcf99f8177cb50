# SPDX-License-Identifier: Apache-2.0
"""Inputs of sparse MLA and the bar on its error, for the tests on a GPU and those that run the PTX on the CPU.

The bar (docs/sparse_mla.md): RMS of (out - reference) at most twice the RMS of (bf16(reference) - reference).
Every record that no list names, and every record behind a masked entry, is NaN: one read of it and the output is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decode.kv_cache import HEAD_DIM, PLAIN_FP8, RecordLayout, RecordView, record_view
from decode.reference import sparse_mla as reference
from decode.sparse_mla import DEFAULT_SM_SCALE, ColumnSet

BLOCK = 32
SLOTS = 2048


@dataclass
class Case:
    """Inputs of a call and what was put into the pools."""

    q: torch.Tensor
    window: ColumnSet
    topk: ColumnSet | None
    sink: torch.Tensor | None = None
    q_scale: float = 1.0
    kv_scale: float = 1.0
    sm_scale: float = DEFAULT_SM_SCALE


def make_pool(
    layout: RecordLayout, num_slots: int = SLOTS, block: int = BLOCK, gap: int = 0, device: str = "cuda"
) -> RecordView:
    """A pool whose every byte says NaN: 0xFF is NaN in E4M3, BF16 and UE8M0. `gap`: bytes between pages."""
    stride = block * layout.record_bytes + gap
    storage = torch.full((num_slots // block * stride + 64,), 0xFF, dtype=torch.uint8, device=device)
    pages = storage.as_strided((num_slots // block, block, layout.record_bytes), (stride, layout.record_bytes, 1))
    return record_view(pages, block, layout)


def make_list(view: RecordView, tokens: int, width: int, masked: float) -> torch.Tensor:
    """Distinct random slots for each token, a share of them masked; the records that are named get values."""
    device = view.pages.device
    order = torch.rand(tokens, view.num_slots, device=device).argsort(dim=1)[:, :width].int()
    hidden = torch.rand(tokens, width, device=device) < masked
    out_of_pool = torch.rand(tokens, width, device=device) < 0.5
    indices = torch.where(hidden, torch.where(out_of_pool, view.num_slots + order, -1), order)
    named = order[~hidden].unique()
    reference.write_records(view, named, torch.randn(len(named), HEAD_DIM, device=device))
    return indices.contiguous()


def make_case(
    layout: RecordLayout = PLAIN_FP8,
    tokens: int = 4,
    heads: int = 16,
    widths: tuple[int, int] = (128, 512),
    masked: float = 0.2,
    sink: bool = False,
    fp8_query: bool = False,
    device: str = "cuda",
    num_slots: int = SLOTS,
    blocks: tuple[int, int] = (BLOCK, BLOCK),
) -> Case:
    """Random inputs. `widths` and `blocks` are of window and top-k; a top-k of width 0 is none at all."""
    q = torch.randn(tokens, heads, HEAD_DIM, device=device) * 4
    q = q.to(torch.float8_e4m3fn) if fp8_query else q.bfloat16()
    sets = []
    for width, block in zip(widths, blocks, strict=True):
        view = make_pool(layout, num_slots, block, gap=96 * 16, device=device)
        sets.append(ColumnSet(view, make_list(view, tokens, width, masked)))
    return Case(q, sets[0], sets[1] if widths[1] else None, torch.randn(heads, device=device) * 3 if sink else None)


def write_nan(view: RecordView, slots: torch.Tensor) -> None:
    """Makes every byte of some records say NaN, scales included."""
    page, offset = slots.long() // view.block, slots.long() % view.block
    layout = view.layout
    for begin, count in (
        (offset * layout.data_bytes, layout.data_bytes),
        (view.block * layout.data_bytes + offset * layout.scale_bytes, layout.scale_bytes),
    ):
        view.pages[page[:, None], begin[:, None] + torch.arange(count, device=begin.device)] = 0xFF


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference gives."""
    sets = [
        (one.records, one.indices, reference.active_columns(one.indices, one.records.num_slots, one.lengths, one.first))
        for one in (case.window, case.topk)
        if one is not None
    ]
    return reference.sparse_mla(
        case.q, sets, sm_scale=case.sm_scale, q_scale=case.q_scale, kv_scale=case.kv_scale, sink=case.sink
    )


def check(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Holds the result to the bar."""
    exact, sums = expected(case)
    assert torch.isfinite(exact).all(), "the reference itself read a record that nobody named"
    lost = out.isnan().nonzero()[:4].tolist()
    assert not lost, f"NaN at {lost}"
    rounding = (exact.bfloat16().float() - exact).square().mean().sqrt()
    error = (out.float() - exact).square().mean().sqrt()
    assert error <= 2.0 * rounding, f"RMS error {error:.3e}, rounding error {rounding:.3e}"
    torch.testing.assert_close(lse, sums, rtol=1e-4, atol=1e-3)
