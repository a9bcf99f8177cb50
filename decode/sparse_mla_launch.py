# SPDX-License-Identifier: Apache-2.0
"""Which sparse MLA kernel a call takes, its arguments as numbers, and the launch; arguments are checked already."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from decode.arguments import check_target, num_sms
from decode.sparse_mla_arguments import ColumnSet
from decode.sparse_mla_layout import COLUMNS, HEADS, MAX_CHUNKS, WIDE_CHUNKS, WIDE_COLUMNS, SparseMlaConfig

if TYPE_CHECKING:
    from decode.sparse_mla_work import ColumnLists, Work
    from nvcomm.jit import CompiledKernel

LOG2_E = 1.4426950408889634
# Clusters to an SM above which 4 wide CTAs beat 5, by how many of the 5 share an SM; measured on an H200.
CROWDED = {1: 0.17, 2: 0.115}


def launch(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    *,
    score_scale: float,
    out_scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    pdl: bool = True,
) -> None:
    """Launches on the current stream of the query's GPU.

    Args:
        q, window, topk, sink, out, lse: as for `sparse_mla`, at least one token.
        score_scale: factor of a score, scales of query and records included.
        out_scale: factor of the output.
        pdl: for programmatic dependent launch; without it only to measure what it brings.
    """
    with torch.cuda.device(q.device):
        cfg, window_columns = configure(q, window, topk, sink, num_sms(q.device))
        work = work_of(q, window, topk, sink, out, lse, window_columns, score_scale, out_scale)
        compiled(replace(cfg, pdl=pdl))(work, q.shape[0], torch.cuda.current_stream().cuda_stream)


def work_of(
    q: torch.Tensor,
    window: ColumnSet,
    topk: ColumnSet | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    window_columns: int,
    score_scale: float,
    out_scale: float,
) -> Work:
    """The call as numbers; `window_columns` from `configure`, the rest as for `launch`."""
    from decode.sparse_mla_work import Work

    return Work(
        q.data_ptr(), q.stride(0) * q.element_size(), out.data_ptr(), lse.data_ptr(),
        sink.data_ptr() if sink is not None else 0,
        column_lists(window), column_lists(topk or window), window_columns, q.shape[1],
        float(score_scale * LOG2_E), float(out_scale),
    )  # fmt: skip


def column_lists(columns: ColumnSet) -> ColumnLists:
    """A column set as numbers."""
    from decode.sparse_mla_work import ColumnLists

    records, indices, lengths = columns.records, columns.indices, columns.lengths
    return ColumnLists(
        indices.data_ptr(), indices.stride(0) * 4, lengths.data_ptr() if lengths is not None else 0,
        records.pages.data_ptr(), records.page_stride_bytes,
        indices.shape[1], int(columns.first), records.block.bit_length() - 1, records.num_slots,
    )  # fmt: skip


def configure(
    q: torch.Tensor, window: ColumnSet, topk: ColumnSet | None, sink: torch.Tensor | None, sms: int
) -> tuple[SparseMlaConfig, int]:
    """The kernel for these arguments on a GPU of `sms` multiprocessors, and the position where the second set begins.

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
    if fits and clusters > sms * CROWDED[cfg.ctas_per_sm]:
        wide = replace(cfg, chunks=WIDE_CHUNKS, columns=WIDE_COLUMNS)
        return wide, widths[0] if topk else WIDE_CHUNKS * WIDE_COLUMNS
    return cfg, window.chunks * COLUMNS


@functools.cache
def compiled(cfg: SparseMlaConfig) -> CompiledKernel:
    """The kernel for a configuration; compiles it, or takes it from the disk, at the first call.

    Raises:
        UnsupportedError: the GPU has no clusters.
    """
    from cutlass.cute.runtime import make_fake_stream

    from decode.sparse_mla_kernel import SparseMlaKernel, fake_arguments
    from nvcomm.jit import compile_kernel

    check_target("sparse_mla")
    return compile_kernel(SparseMlaKernel(cfg), *fake_arguments(), make_fake_stream(), key=(cfg,))
