# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of the indexer's logits, for decode: one kernel a call, any length, no decision by data on the host.

    indices = decode_topk(logits, lengths, 512)

See docs/topk.md for the contract and the algorithm, decode/topk_kernel.py for the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decode.arguments import check_target, num_sms
from decode.reference import topk as reference
from decode.topk_arguments import check_rows, checked_k, output
from decode.topk_config import NUM_BLOCKS_SELECTED, TopkConfig, choose_config

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
        UnsupportedError: the GPU is older than Hopper.

    Ordering:
        Runs on the current stream, does not block, may be captured. Launched with programmatic stream
        serialization: it waits for the kernel before it before it reads or writes global memory.
    """
    k = checked_k(k)
    check_rows(logits, lengths)
    out = output(logits, k, out)
    if logits.device.type == "cpu":
        return out.copy_(reference.topk(logits, lengths, k))
    if logits.shape[0] > 0:
        (rows, columns), sms = logits.shape, num_sms(logits.device)
        config = choose_config(rows, columns, k, deterministic=bool(deterministic), num_sms=sms)
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
        UnsupportedError: the GPU is older than Hopper.

    Ordering:
        As `decode_topk`.
    """
    check_rows(logits, lengths, rows_per_length)
    out = output(logits, NUM_BLOCKS_SELECTED, out)
    if logits.device.type == "cpu":
        shared = lengths.repeat_interleave(rows_per_length)
        return out.copy_(reference.topk_blocks(logits, shared, NUM_BLOCKS_SELECTED))
    if logits.shape[0] > 0:
        (rows, columns), sms = logits.shape, num_sms(logits.device)
        config = choose_config(rows, columns, NUM_BLOCKS_SELECTED, mode="blocks", num_sms=sms)
        launch(config, logits, lengths, out, int(rows_per_length))
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
    """The kernel of `config`, compiled or taken from the cache.

    Raises:
        UnsupportedError: the GPU has no clusters.
    """
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from decode.topk_kernel import TopkKernel
    from nvcomm.jit import compile_kernel

    kernel = _KERNELS.get(config)
    if kernel is None:
        check_target("decode_topk")
        addresses, extents = [Int64(0)] * 5, [Int32(1)] * 3
        kernel = compile_kernel(TopkKernel(config), *addresses, *extents, make_fake_stream(), key=(config,))
        _KERNELS[config] = kernel
    return kernel


# Spares a launch the text of its cache key. Kernels live as long as the process: graphs may hold them.
_KERNELS: dict[TopkConfig, CompiledKernel] = {}
