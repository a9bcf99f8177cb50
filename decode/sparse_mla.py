# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode: attention of a few tokens over the columns that their lists name. See docs/sparse_mla.md."""

from __future__ import annotations

import torch

from decode.kv_cache import HEAD_DIM
from decode.reference import sparse_mla as reference
from decode.sparse_mla_arguments import ColumnSet, call_reasons
from decode.sparse_mla_launch import launch
from nvcomm.errors import UsageError

__all__ = ["DEFAULT_SM_SCALE", "ColumnSet", "sparse_mla"]

DEFAULT_SM_SCALE = HEAD_DIM**-0.5


def sparse_mla(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None = None,
    *,
    sm_scale: float = DEFAULT_SM_SCALE,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T) k over the union of two column sets, k being the 512 values of a record.

    Args:
        q: (tokens, heads, 512), BF16, or E4M3 where the records are plain FP8; heads 8 or a multiple of 16; token
            stride any, otherwise contiguous; 16-byte aligned.
        window: first set. The two sets together have at most 5 chunks of 128 columns, each begun chunk counting.
        topk: second set, records of the same layout, maybe of another pool.
        sm_scale: factor of a score.
        q_scale: what an E4M3 query stands for, per tensor.
        kv_scale: what the records stand for, per tensor.
        sink: (heads,) FP32: a score that takes part in the softmax and has no value. -inf: none.
        out: (tokens, heads, 512) BF16, contiguous, 16-byte aligned; made if not given.
        lse: (tokens, heads) FP32, contiguous; made if not given.

    Returns:
        `out`, and `lse`: the natural log of the sum of exponentials without the sink. A token without an active column
        gets 0 and +inf.

    Raises:
        UsageError: the arguments do not fit; the message lists all that does not. Nothing was launched.
        UnsupportedError: the GPU is older than Hopper.

    Ordering:
        On the current stream. One kernel, launched with the attribute for programmatic dependent launch: it waits for
        the kernel before it, and lets the one behind it start early if that one waits likewise. Captured graphs replay
        with whatever the tensors hold then. CPU tensors go through the reference, blocking.
    """
    reasons = call_reasons(q, window, topk, sink, out, lse, sm_scale=sm_scale, q_scale=q_scale, kv_scale=kv_scale)
    if reasons:
        raise UsageError("sparse_mla: " + "; ".join(reasons) + ".")
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not q.is_cuda:
        _on_cpu(q, window, topk, sm_scale, q_scale, kv_scale, sink, out, lse)
    elif tokens:
        launch(
            q, window, topk, score_scale=sm_scale * q_scale * kv_scale, out_scale=kv_scale, sink=sink, out=out, lse=lse
        )
    return out, lse


def _on_cpu(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    sm_scale: float,
    q_scale: float,
    kv_scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    sets = [
        (one.records, one.indices, reference.active_columns(one.indices, one.records.num_slots, one.lengths, one.first))
        for one in (window, topk)
        if one is not None
    ]
    exact, sums = reference.sparse_mla(q, sets, sm_scale=sm_scale, q_scale=q_scale, kv_scale=kv_scale, sink=sink)
    out.copy_(exact)
    lse.copy_(sums)
