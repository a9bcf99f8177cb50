# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of the indexer's logits, for decode: one kernel a call, any length, no decision by data on the host.

    indices = decode_topk(logits, lengths, 512)

See docs/topk.md for the contract and the algorithm, decode/topk_kernel.py for the kernel.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from decode.reference import topk as reference
from decode.topk_config import MAX_COLUMNS, MAX_ROWS, NUM_BLOCKS_SELECTED, SUPPORTED_K, TopkConfig, choose_config
from nvcomm.errors import UsageError

if TYPE_CHECKING:
    from nvcomm.jit import CompiledKernel


def decode_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """The columns of the k largest logits of each row.

    Args:
        logits: (rows, columns) bf16, up to 192 rows of up to 1,048,576 columns. Columns contiguous; rows at addresses
            that are multiples of 16 bytes.
        lengths: (rows,) int32, contiguous, on the same device: columns at and past a row's length are never
            candidates and may hold anything. Negative counts as 0, more than `columns` as `columns`. Read on the
            device: a captured graph follows what the tensor holds at each replay.
        k: 512, 1024 or 2048.
        out: (rows, k) int32 to write to, columns contiguous; allocated if None.
        deterministic: of equal values the smaller column is selected, and indices ascend. Slower.

    Returns:
        `out`: column indices in any order, the same multiset of values as `torch.topk`; NaN counts as larger than
        +inf, both zeros as equal. A row shorter than k has all of its columns first, then -1.

    Raises:
        UsageError: an argument is not as above; nothing was launched.

    Ordering:
        Runs on the current stream, does not block, may be captured. Launched with programmatic stream
        serialization: it waits for the kernel before it before it reads or writes global memory.
    """
    if k not in SUPPORTED_K:
        raise UsageError(f"k is {k!r}; wanted one of {SUPPORTED_K}.")
    out = _check(logits, lengths, k, out, rows_per_length=1)
    if logits.device.type == "cpu":
        return out.copy_(reference.topk(logits, lengths, k))
    if logits.shape[0] > 0:
        (rows, columns), sms = logits.shape, num_sms(logits.device)
        config = choose_config(rows, columns, k, deterministic=deterministic, num_sms=sms)
        launch(config, logits, lengths, out)
    return out


def decode_topk_blocks(
    logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor | None = None, *, rows_per_length: int = 1
) -> torch.Tensor:
    """The 2,048 blocks of 8 columns with the largest maxima of each row, the newest block always among them.

    Args:
        logits: as for `decode_topk`.
        lengths: (rows / rows_per_length,) int32; that many consecutive rows share a length.
        out: (rows, 2048) int32 to write to, columns contiguous; allocated if None.
        rows_per_length: rows that share a length; divides the number of rows.

    Returns:
        `out`: block indices (column // 8), the newest block (of column length - 1) first, the others in any order, -1
        behind them. A block's value is the maximum of its columns below the length, NaN if one of them is NaN, and
        NaN counts as larger than +inf. A block of -inf alone is not selected unless it is the newest.

    Raises:
        UsageError: an argument is not as above; nothing was launched.

    Ordering:
        As `decode_topk`.
    """
    if rows_per_length < 1:
        raise UsageError(f"rows_per_length is {rows_per_length}; it has to be at least 1.")
    out = _check(logits, lengths, NUM_BLOCKS_SELECTED, out, rows_per_length=rows_per_length)
    if logits.device.type == "cpu":
        shared = lengths.repeat_interleave(rows_per_length)
        return out.copy_(reference.topk_blocks(logits, shared, NUM_BLOCKS_SELECTED))
    if logits.shape[0] > 0:
        (rows, columns), sms = logits.shape, num_sms(logits.device)
        config = choose_config(rows, columns, NUM_BLOCKS_SELECTED, mode="blocks", num_sms=sms)
        launch(config, logits, lengths, out, rows_per_length)
    return out


def launch(
    config: TopkConfig, logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, rows_per_length: int = 1
) -> None:
    """Launches one compiled variant on the current stream; arguments are checked already."""
    rows, columns = logits.shape
    with torch.cuda.device(logits.device):
        compiled(config)(
            logits.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            logits.stride(0) * logits.element_size(),
            out.stride(0) * out.element_size(),
            rows,
            columns,
            rows_per_length,
            torch.cuda.current_stream().cuda_stream,
        )


def compiled(config: TopkConfig) -> CompiledKernel:
    """The kernel of `config`, compiled or taken from the cache."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from decode.topk_kernel import TopkKernel
    from nvcomm.jit import compile_kernel

    kernel = _KERNELS.get(config)
    if kernel is None:
        addresses, extents = [Int64(0)] * 5, [Int32(1)] * 3
        kernel = compile_kernel(TopkKernel(config), *addresses, *extents, make_fake_stream(), key=(config,))
        _KERNELS[config] = kernel
    return kernel


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# Spares a launch the text of its cache key. Kernels live as long as the process: graphs may hold them.
_KERNELS: dict[TopkConfig, CompiledKernel] = {}


def _check(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor | None, *, rows_per_length: int
) -> torch.Tensor:
    """Checks every argument and returns the output tensor."""
    if logits.dtype != torch.bfloat16 or logits.dim() != 2:
        raise UsageError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}; pass bfloat16 (rows, columns).")
    rows, columns = logits.shape
    if rows > MAX_ROWS or columns > MAX_COLUMNS:
        raise UsageError(
            f"logits have {rows} rows of {columns} columns; at most {MAX_ROWS} rows of {MAX_COLUMNS} are supported. "
            "Split the rows over several calls."
        )
    if columns > 1 and logits.stride(1) != 1:
        raise UsageError(
            f"logits have column stride {logits.stride(1)}; wanted 1, contiguous columns: call .contiguous()."
        )
    if rows > 1 and (logits.stride(0) % 8 != 0 or logits.stride(0) < columns):
        raise UsageError(
            f"logits have row stride {logits.stride(0)}; rows have to start at multiples of 16 bytes (8 columns) and "
            f"not overlap ({columns} columns): pad the buffer."
        )
    if logits.numel() > 0 and logits.data_ptr() % 16 != 0:
        raise UsageError(
            f"logits start at address {logits.data_ptr():#x}, which is not a multiple of 16 bytes: begin at a "
            "column that is a multiple of 8, or copy them."
        )
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (rows // rows_per_length,) or rows % rows_per_length:
        raise UsageError(
            f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)}; {rows} rows that share lengths in groups of "
            f"{rows_per_length} need int32 of shape ({rows / rows_per_length:g},)."
        )
    if not lengths.is_contiguous():
        raise UsageError(f"lengths have stride {lengths.stride()}; wanted them contiguous: call .contiguous().")
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    elif out.dtype != torch.int32 or tuple(out.shape) != (rows, k) or out.stride(1) != 1:
        raise UsageError(
            f"out is {out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}; pass int32 {(rows, k)} with "
            "contiguous columns."
        )
    if rows > 1 and out.stride(0) < k:
        raise UsageError(f"out has row stride {out.stride(0)}: its rows overlap. Give it a row stride of at least {k}.")
    for name, tensor in (("lengths", lengths), ("out", out)):
        if tensor.device != logits.device:
            raise UsageError(f"logits are on {logits.device}, {name} on {tensor.device}; pass all on one device.")
    if logits.device.type not in {"cpu", "cuda"}:
        raise UsageError(
            f"logits are on {logits.device}; wanted a CUDA GPU, or the CPU, where the reference answers: move them."
        )
    return out
