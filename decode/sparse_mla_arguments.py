# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA is called with: column sets, and everything that can be wrong with a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decode.arguments import device_reasons, grad_reasons, integer_reasons, number_reasons, tensor_reasons
from decode.kv_cache import HEAD_DIM, LAYOUTS, PLAIN_FP8, RecordView
from decode.sparse_mla_layout import COLUMNS, HEADS, MAX_CHUNKS

MAX_TOKENS = 65535
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """Where some of a token's columns are.

    Attributes:
        records: the pool, from `record_view`.
        indices: (tokens, width) int32, row stride any: slots of the pool. An entry that is negative or no slot of the
            pool is masked: its record is not read.
        lengths: (tokens,) int32: entries at or past it are masked. None: the width bounds the list.
        first: position of entry 0 in what `lengths` counts. For a list of 128 window columns and then the compressed
            ones, with one length for both, the second set has first=128.
    """

    records: RecordView
    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    first: int = 0

    @property
    def chunks(self) -> int:
        """CTAs for this set."""
        return -(-self.indices.shape[1] // COLUMNS)


def call_reasons(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    **scales: float,
) -> list[str]:
    """Everything that is wrong with the arguments of `sparse_mla`; `scales` are its numbers, by name."""
    reasons = [reason for name, value in scales.items() for reason in number_reasons(name, value)]
    sets = {"window": window} if topk is None else {"window": window, "topk": topk}
    unseen = tensor_reasons("q", q) + [reason for name, one in sets.items() for reason in _kind_reasons(name, one)]
    if unseen:
        return reasons + unseen
    reasons += _query_reasons(q, window)
    if q.dim() != 3:
        return reasons
    tokens, heads, _ = q.shape
    for name, one in sets.items():
        reasons += _set_reasons(name, one, q)
    layouts = {name: one.records.layout for name, one in sets.items()}
    if len(set(layouts.values())) > 1:
        reasons.append(
            f"the records of window are {layouts['window'].name}, those of topk {layouts['topk'].name}: "
            "wanted one layout"
        )
    if all(one.indices.dim() == 2 for one in sets.values()):
        chunks = sum(one.chunks for one in sets.values())
        if not 1 <= chunks <= MAX_CHUNKS:
            reasons.append(f"the sets have {chunks} chunks of {COLUMNS} columns, wanted 1 to {MAX_CHUNKS}")
    reasons += _tensor_reasons("sink", sink, (heads,), torch.float32, q)
    reasons += _tensor_reasons("out", out, (tokens, heads, HEAD_DIM), torch.bfloat16, q)
    reasons += _tensor_reasons("lse", lse, (tokens, heads), torch.float32, q)
    if isinstance(out, torch.Tensor) and out.device == q.device and out.data_ptr() % 16:
        reasons.append("out is not 16-byte aligned")
    return reasons


def _kind_reasons(name: str, one: ColumnSet) -> list[str]:
    """Why nobody can look into a column set."""
    if not isinstance(one, ColumnSet):
        return [f"{name} is a {type(one).__name__}, wanted a ColumnSet"]
    reasons = tensor_reasons(f"{name}.indices", one.indices)
    if not isinstance(one.records, RecordView):
        reasons.append(f"{name}.records is a {type(one.records).__name__}, wanted what record_view returns")
    return reasons


def _query_reasons(q: torch.Tensor, window: ColumnSet) -> list[str]:
    if q.dim() != 3 or q.shape[2] != HEAD_DIM:
        return [f"q has shape {tuple(q.shape)}, wanted (tokens, heads, {HEAD_DIM})"]
    tokens, heads, _ = q.shape
    reasons = device_reasons("q", q) + grad_reasons("q", q)
    fp8 = q.dtype == torch.float8_e4m3fn
    if not (q.dtype == torch.bfloat16 or (fp8 and window.records.layout == PLAIN_FP8)):
        reasons.append(
            f"q is {q.dtype} and the records are {window.records.layout.name}: wanted bfloat16, or float8_e4m3fn with "
            f"plain_fp8 records"
        )
    if heads != 8 and (heads % HEADS or heads == 0):
        reasons.append(f"q has {heads} heads, wanted 8 or a multiple of {HEADS}")
    if tokens > MAX_TOKENS:
        reasons.append(f"q has {tokens} tokens, wanted at most {MAX_TOKENS}: split them over several calls")
    if tokens and (q.stride(2) != 1 or q.stride(1) != HEAD_DIM):
        reasons.append(f"q has strides {q.stride()}, wanted (any, {HEAD_DIM}, 1): call contiguous()")
    if q.data_ptr() % 16 or (tokens > 1 and q.stride(0) * q.element_size() % 16):
        reasons.append("q is not 16-byte aligned in every token")
    return reasons


def _set_reasons(name: str, columns: ColumnSet, q: torch.Tensor) -> list[str]:
    indices, records, reasons = columns.indices, columns.records, []
    if indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        reasons.append(f"{name}.indices has shape {tuple(indices.shape)}, wanted ({q.shape[0]}, width)")
    elif indices.shape[1] > 1 and indices.stride(1) != 1:
        reasons.append(f"{name}.indices has stride {indices.stride(1)} along a list, wanted 1: call contiguous()")
    if indices.dtype != torch.int32:
        reasons.append(f"{name}.indices is {indices.dtype}, wanted int32: convert it")
    for what, tensor in (("indices", indices), ("records", records.pages)):
        if tensor.device != q.device:
            reasons.append(f"{name}.{what} is on {tensor.device}, wanted {q.device} like q: move it")
    if records.layout not in LAYOUTS:
        known = ", ".join(layout.name for layout in LAYOUTS)
        reasons.append(f"{name}.records are {records.layout}, wanted one of the layouts {known}")
    elif records.layout.scale_bytes and records.block * records.layout.record_bytes > MAX_INT32:
        # The kernel counts the offset of a scale in its page, unlike every other offset, in 32 bits.
        reasons.append(
            f"{name}.records has pages of {records.block * records.layout.record_bytes} bytes, and offsets of scales "
            f"in a page end at {MAX_INT32}: view the pool as smaller pages"
        )
    # Positions in the list are added to it in 32 bits.
    reasons += integer_reasons(f"{name}.first", columns.first, 0, MAX_INT32 - MAX_CHUNKS * COLUMNS)
    return reasons + _tensor_reasons(f"{name}.lengths", columns.lengths, (q.shape[0],), torch.int32, q)


def _tensor_reasons(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor
) -> list[str]:
    if tensor is None:
        return []
    if reasons := tensor_reasons(name, tensor):
        return reasons
    reasons = grad_reasons(name, tensor)
    if tensor.shape != shape:
        reasons.append(f"{name} has shape {tuple(tensor.shape)}, wanted {shape}")
    if tensor.dtype != dtype:
        reasons.append(f"{name} is {tensor.dtype}, wanted {dtype}: convert it")
    if not tensor.is_contiguous():
        reasons.append(f"{name} has strides {tensor.stride()}, wanted contiguous: call contiguous()")
    if tensor.device != q.device:
        reasons.append(f"{name} is on {tensor.device}, wanted {q.device} like q: move it")
    return reasons
