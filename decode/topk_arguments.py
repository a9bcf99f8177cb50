# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands to a top-k, before anything is launched. Each raises UsageError."""

from __future__ import annotations

from numbers import Integral

import torch

from decode.arguments import device_reasons, integer_reasons, shown, tensor_reasons
from decode.topk_config import MAX_COLUMNS, MAX_ROWS, SUPPORTED_K
from nvcomm.errors import UsageError


def checked_k(k: int) -> int:
    """`k` as a plain integer, if there is a kernel for it."""
    if not isinstance(k, Integral) or k not in SUPPORTED_K:
        raise UsageError(f"k is {shown(k)}; wanted one of {SUPPORTED_K}.")
    return int(k)


def check_rows(
    logits: torch.Tensor, lengths: torch.Tensor, rows_per_length: int = 1, *, max_rows: int = MAX_ROWS
) -> None:
    """Logits and lengths are as `decode_topk` wants them.

    Args:
        logits: see there.
        lengths: see there.
        rows_per_length: rows that share a length.
        max_rows: how many may come: more than MAX_ROWS where they are divided over several calls.
    """
    reasons = tensor_reasons("logits", logits) + tensor_reasons("lengths", lengths)
    reasons += integer_reasons("rows_per_length", rows_per_length, 1, MAX_ROWS)
    if reasons:
        raise UsageError("; ".join(reasons) + ".")
    _check_logits(logits, max_rows)
    rows = logits.shape[0]
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (rows // rows_per_length,) or rows % rows_per_length:
        raise UsageError(
            f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)}; {rows} rows that share lengths in groups of "
            f"{rows_per_length} need int32 of shape ({rows / rows_per_length:g},): slice or convert them."
        )
    if not lengths.is_contiguous():
        raise UsageError(f"lengths have stride {lengths.stride()}; wanted them contiguous: call .contiguous().")
    if lengths.device != logits.device:
        raise UsageError(f"logits are on {logits.device}, lengths on {lengths.device}; pass both on one device.")


def _check_logits(logits: torch.Tensor, max_rows: int) -> None:
    if logits.dtype != torch.bfloat16 or logits.dim() != 2:
        raise UsageError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}; pass bfloat16 (rows, columns).")
    rows, columns = logits.shape
    if rows > max_rows or columns > MAX_COLUMNS:
        raise UsageError(
            f"logits have {rows} rows of {columns} columns; at most {max_rows} rows of {MAX_COLUMNS} are supported. "
            "Split the rows over several calls; no kernel takes wider ones."
        )
    if columns > 1 and logits.stride(1) != 1:
        raise UsageError(
            f"logits have column stride {logits.stride(1)}; wanted 1, contiguous columns: call .contiguous()."
        )
    if rows > 1 and columns > 0 and (logits.stride(0) % 8 != 0 or logits.stride(0) < columns):
        raise UsageError(
            f"logits have row stride {logits.stride(0)}; rows have to start at multiples of 16 bytes (8 columns) and "
            f"not overlap ({columns} columns): pad the buffer."
        )
    if reasons := device_reasons("logits", logits):
        raise UsageError(f"{reasons[0]}.")
    if logits.numel() > 0 and logits.data_ptr() % 16 != 0:
        raise UsageError(
            f"logits start at address {logits.data_ptr():#x}, which is not a multiple of 16 bytes: begin at a "
            "column that is a multiple of 8, or copy them."
        )


def output(logits: torch.Tensor, k: int, out: torch.Tensor | None) -> torch.Tensor:
    """`out` if it can take (rows, k) indices, or a new tensor."""
    rows = logits.shape[0]
    if out is None:
        return torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    if reasons := tensor_reasons("out", out):
        raise UsageError(f"{reasons[0]}.")
    if out.dtype != torch.int32 or tuple(out.shape) != (rows, k) or out.stride(1) != 1:
        raise UsageError(
            f"out is {out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}; pass int32 {(rows, k)} with "
            "contiguous columns."
        )
    if rows > 1 and out.stride(0) < k:
        raise UsageError(f"out has row stride {out.stride(0)}: its rows overlap. Give it a row stride of at least {k}.")
    if out.device != logits.device:
        raise UsageError(f"logits are on {logits.device}, out on {out.device}; pass both on one device.")
    return out
