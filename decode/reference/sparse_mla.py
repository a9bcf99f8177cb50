# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode in plain torch, FP32: the definition of what the kernel computes; records in and out of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode.kv_cache import BF16, HEAD_DIM, PLAIN_FP8, RecordLayout, RecordView

SCALE_GROUP = 64


def sparse_mla(
    q: torch.Tensor,
    sets: Sequence[tuple[RecordView, torch.Tensor, torch.Tensor]],
    *,
    sm_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each token over the columns that its lists name; keys are values.

    Args:
        q: (tokens, heads, 512), any float dtype.
        sets: (records, slots (tokens, width) int, active (tokens, width) bool) of each column set.
        sm_scale: factor of a score.
        q_scale: what an E4M3 query is multiplied with.
        kv_scale: what records are multiplied with.
        sink: (heads,) FP32, a score without a value, or None.

    Returns:
        Output (tokens, heads, 512) FP32, and the natural log of the sum of exponentials (tokens, heads) FP32 without
        the sink. A token with no active column has output 0 and +inf.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, HEAD_DIM, device=q.device)
    lse = torch.full((tokens, heads), float("inf"), device=q.device)
    for token in range(tokens):
        rows = [read_records(records, slots[token][active[token]]) for records, slots, active in sets]
        keys = torch.cat(rows) * kv_scale
        if len(keys) == 0:
            continue
        scores = (q[token].float() * q_scale) @ keys.T * sm_scale
        lse[token] = torch.logsumexp(scores, dim=-1)
        total = lse[token] if sink is None else torch.logaddexp(lse[token], sink)
        weights = torch.exp(scores - total[:, None])
        out[token] = weights @ keys
    return out, lse


def active_columns(
    indices: torch.Tensor, num_slots: int, lengths: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """(tokens, width) bool: entries that name a slot and lie within their token's length."""
    inside = (indices >= 0) & (indices < num_slots)
    if lengths is not None:
        position = torch.arange(indices.shape[1], device=indices.device) + first
        inside &= position < lengths[:, None]
    return inside


def read_records(view: RecordView, slots: torch.Tensor) -> torch.Tensor:
    """Records as (len(slots), 512) FP32."""
    layout, slots = view.layout, slots.long()
    page, offset = slots // view.block, slots % view.block
    data = _bytes(view, page, offset * layout.data_bytes, layout.data_bytes)
    if layout == BF16:
        return data.view(torch.bfloat16).float()
    values = data[:, : layout.fp8_dims].contiguous().view(torch.float8_e4m3fn).float()
    if layout == PLAIN_FP8:
        return values
    scales = _bytes(view, page, view.block * layout.data_bytes + offset * layout.scale_bytes, layout.scale_bytes)
    groups = layout.fp8_dims // SCALE_GROUP
    values = values * _ue8m0(scales[:, :groups]).repeat_interleave(SCALE_GROUP, dim=1)
    rest = data[:, layout.fp8_dims :].contiguous().view(torch.bfloat16).float()
    return torch.cat([values, rest], dim=1)


def write_records(view: RecordView, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Stores (len(slots), 512) float values, rounded to the layout; scales are the smallest powers of two that fit."""
    layout, slots = view.layout, slots.long()
    page, offset = slots // view.block, slots % view.block
    if layout == BF16:
        data = values.bfloat16().contiguous().view(torch.uint8)
    elif layout == PLAIN_FP8:
        data = values.to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
    else:
        data, scales = _quantise(values.float(), layout)
        _put_bytes(view, page, view.block * layout.data_bytes + offset * layout.scale_bytes, scales)
    _put_bytes(view, page, offset * layout.data_bytes, data)


def _quantise(values: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    groups = values[:, : layout.fp8_dims].reshape(len(values), layout.fp8_dims // SCALE_GROUP, SCALE_GROUP)
    exponents = torch.ceil(torch.log2(groups.abs().amax(dim=2).clamp_min(1e-30) / 448.0)).clamp(-127, 127)
    fp8 = (groups / torch.exp2(exponents)[:, :, None]).to(torch.float8_e4m3fn).reshape(len(values), layout.fp8_dims)
    rest = values[:, layout.fp8_dims :].bfloat16().contiguous()
    data = torch.cat([fp8.view(torch.uint8), rest.view(torch.uint8)], dim=1)
    scales = torch.zeros(len(values), layout.scale_bytes, dtype=torch.uint8, device=values.device)
    scales[:, : exponents.shape[1]] = (exponents + 127).to(torch.uint8)
    return data, scales


def _ue8m0(scales: torch.Tensor) -> torch.Tensor:
    power = torch.exp2(scales.float() - 127.0)
    return torch.where(scales == 255, torch.full_like(power, float("nan")), power)


def _places(begin: torch.Tensor, count: int) -> torch.Tensor:
    return begin[:, None] + torch.arange(count, device=begin.device)


def _bytes(view: RecordView, page: torch.Tensor, begin: torch.Tensor, count: int) -> torch.Tensor:
    return view.pages[page[:, None], _places(begin, count)]


def _put_bytes(view: RecordView, page: torch.Tensor, begin: torch.Tensor, data: torch.Tensor) -> None:
    view.pages[page[:, None], _places(begin, data.shape[1])] = data
