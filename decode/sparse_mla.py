# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode: attention of a few tokens over the columns that their lists name. See docs/sparse_mla.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from decode.kv_cache import HEAD_DIM, PLAIN_FP8, RecordView
from decode.reference import sparse_mla as reference
from decode.sparse_mla_layout import COLUMNS, HEADS, MAX_CHUNKS, WIDE_CHUNKS, WIDE_COLUMNS, SparseMlaConfig
from nvcomm.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from nvcomm.jit import CompiledKernel

DEFAULT_SM_SCALE = HEAD_DIM**-0.5
LOG2_E = 1.4426950408889634
MAX_TOKENS = 65535
OLDEST_ARCH = 90
# Clusters to an SM above which 4 wide CTAs beat 5, by how many of the 5 share an SM; measured on an H200.
CROWDED = {1: 0.17, 2: 0.115}


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
        return -(-self.indices.shape[1] // COLUMNS) if self.indices.dim() == 2 else 0


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
    reasons = _reasons(q, window, topk, sink, out, lse)
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
        _launch(q, window, topk, sm_scale * q_scale * kv_scale, kv_scale, sink, out, lse)
    return out, lse


def _reasons(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> list[str]:
    """Everything that is wrong with the arguments."""
    if q.dim() != 3 or q.shape[2] != HEAD_DIM:
        return [f"q has shape {tuple(q.shape)}, wanted (tokens, heads, {HEAD_DIM})"]
    tokens, heads, _ = q.shape
    reasons = []
    fp8 = q.dtype == torch.float8_e4m3fn
    if not (q.dtype == torch.bfloat16 or (fp8 and window.records.layout == PLAIN_FP8)):
        reasons.append(
            f"q is {q.dtype} and the records are {window.records.layout.name}: wanted bfloat16, or float8_e4m3fn with "
            f"plain_fp8 records"
        )
    if heads != 8 and (heads % HEADS or heads == 0):
        reasons.append(f"q has {heads} heads, wanted 8 or a multiple of {HEADS}")
    if tokens > MAX_TOKENS:
        reasons.append(f"q has {tokens} tokens, wanted at most {MAX_TOKENS}")
    if tokens and (q.stride(2) != 1 or q.stride(1) != HEAD_DIM):
        reasons.append(f"q has strides {q.stride()}, wanted (any, {HEAD_DIM}, 1): call contiguous()")
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        reasons.append(f"q is on {q.device}, the current device is {torch.cuda.current_device()}: set_device first")
    if q.data_ptr() % 16 or (tokens > 1 and q.stride(0) * q.element_size() % 16):
        reasons.append("q is not 16-byte aligned in every token")
    reasons += _set_reasons("window", window, q)
    if topk is not None:
        reasons += _set_reasons("topk", topk, q)
        if topk.records.layout != window.records.layout:
            reasons.append(
                f"the records of window are {window.records.layout.name}, those of topk {topk.records.layout.name}: "
                f"wanted one layout"
            )
    chunks = window.chunks + (topk.chunks if topk else 0)
    if not 1 <= chunks <= MAX_CHUNKS:
        reasons.append(f"the sets have {chunks} chunks of {COLUMNS} columns, wanted 1 to {MAX_CHUNKS}")
    reasons += _tensor_reasons("sink", sink, (heads,), torch.float32, q)
    reasons += _tensor_reasons("out", out, (tokens, heads, HEAD_DIM), torch.bfloat16, q)
    reasons += _tensor_reasons("lse", lse, (tokens, heads), torch.float32, q)
    if out is not None and out.data_ptr() % 16:
        reasons.append("out is not 16-byte aligned")
    return reasons


def _set_reasons(name: str, columns: ColumnSet, q: torch.Tensor) -> list[str]:
    indices, reasons = columns.indices, []
    if indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        reasons.append(f"{name}.indices has shape {tuple(indices.shape)}, wanted ({q.shape[0]}, width)")
    elif indices.shape[1] > 1 and indices.stride(1) != 1:
        reasons.append(f"{name}.indices has stride {indices.stride(1)} along a list, wanted 1")
    if indices.dtype != torch.int32:
        reasons.append(f"{name}.indices is {indices.dtype}, wanted int32")
    for what, tensor in (("indices", indices), ("records", columns.records.pages)):
        if tensor.device != q.device:
            reasons.append(f"{name}.{what} is on {tensor.device}, wanted {q.device} like q")
    return reasons + _tensor_reasons(f"{name}.lengths", columns.lengths, (q.shape[0],), torch.int32, q)


def _tensor_reasons(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor
) -> list[str]:
    if tensor is None:
        return []
    reasons = []
    if tensor.shape != shape:
        reasons.append(f"{name} has shape {tuple(tensor.shape)}, wanted {shape}")
    if tensor.dtype != dtype:
        reasons.append(f"{name} is {tensor.dtype}, wanted {dtype}")
    if not tensor.is_contiguous():
        reasons.append(f"{name} has strides {tensor.stride()}, wanted contiguous")
    if tensor.device != q.device:
        reasons.append(f"{name} is on {tensor.device}, wanted {q.device} like q")
    return reasons


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


def _launch(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    score_scale: float,
    out_scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    tokens, heads, _ = q.shape
    cfg, window_columns = configure(q, window, topk, sink, _num_sms(q.device.index))
    kernel = compiled(cfg)
    window_addresses, window_ints = _set_arguments(window)
    topk_addresses, topk_ints = _set_arguments(topk) if topk else (window_addresses, window_ints)
    kernel(
        q.data_ptr(), q.stride(0) * q.element_size(), out.data_ptr(), lse.data_ptr(),
        sink.data_ptr() if sink is not None else 0,
        window_addresses, window_ints, topk_addresses, topk_ints, window_columns, heads, tokens,
        score_scale * LOG2_E, out_scale, torch.cuda.current_stream(q.device).cuda_stream,
    )  # fmt: skip


def configure(
    q: torch.Tensor, window: ColumnSet, topk: ColumnSet | None, sink: torch.Tensor | None, num_sms: int
) -> tuple[SparseMlaConfig, int]:
    """The kernel for these arguments, and the position at which the second set begins.

    4 CTAs of 160 columns take longer than 5 of 128, and more such clusters find room. On an H200, with calls that start
    early, they win from 16 clusters on, of BF16 records from 23 on (docs/results/sparse_mla.md).
    """
    chunks = window.chunks + (topk.chunks if topk else 0)
    widths = [one.indices.shape[1] for one in (window, topk) if one]
    cfg = SparseMlaConfig(
        window.records.layout, chunks, q.dtype == torch.float8_e4m3fn, q.shape[1] == 8, sink is not None
    )
    clusters = q.shape[0] * -(-q.shape[1] // HEADS)
    fits = chunks == MAX_CHUNKS and sum(widths) <= WIDE_CHUNKS * WIDE_COLUMNS and not cfg.scaled
    if fits and clusters > num_sms * CROWDED[cfg.ctas_per_sm]:
        wide = replace(cfg, chunks=WIDE_CHUNKS, columns=WIDE_COLUMNS)
        return wide, widths[0] if topk else WIDE_CHUNKS * WIDE_COLUMNS
    return cfg, window.chunks * COLUMNS


@functools.cache
def _num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _set_arguments(columns: ColumnSet) -> tuple[list[int], list[int]]:
    """A column set as the kernel takes it: addresses and byte strides, then 32-bit numbers."""
    records, indices, lengths = columns.records, columns.indices, columns.lengths
    addresses = [
        indices.data_ptr(), indices.stride(0) * 4, lengths.data_ptr() if lengths is not None else 0,
        records.pages.data_ptr(), records.page_stride_bytes,
    ]  # fmt: skip

    return addresses, [indices.shape[1], columns.first, records.block.bit_length() - 1, records.num_slots]


@functools.cache
def compiled(cfg: SparseMlaConfig) -> CompiledKernel:
    """The kernel for a configuration; compiles it, or takes it from the disk, at the first call.

    Raises:
        UnsupportedError: the GPU has no clusters.
    """
    from cutlass.cute.runtime import make_fake_stream

    from decode.sparse_mla_kernel import SparseMlaKernel, fake_arguments
    from nvcomm.jit import compile_kernel, target_arch

    arch = target_arch()
    if int("".join(filter(str.isdigit, arch))) < OLDEST_ARCH:
        raise UnsupportedError(f"sparse_mla needs clusters of CTAs (sm_90 or newer), this is {arch}: use CPU tensors.")
    return compile_kernel(SparseMlaKernel(cfg), *fake_arguments(), make_fake_stream(), key=(cfg,))
