# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse MLA to measure: pools larger than any cache, tensors of a call, its floor and its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from decode.kv_cache import LAYOUTS, RecordLayout, RecordView, record_view
from decode.reference import sparse_mla as reference
from decode.sparse_mla import DEFAULT_SM_SCALE, ColumnSet
from decode.sparse_mla_launch import launch

WINDOW = 128
POOL_SLOTS = (1 << 18, 1 << 20)
BLOCKS = (32, 128)


@dataclasses.dataclass
class Call:
    """Tensors of one call."""

    q: torch.Tensor
    window: ColumnSet
    topk: ColumnSet | None
    sink: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor


def make_call(pools: list[RecordView], query: str, columns: int, tokens: int, heads: int) -> Call:
    slots = torch.cat(
        [
            torch.randint(0, view.num_slots, (tokens, width), dtype=torch.int32, device="cuda")
            for view, width in zip(pools, (min(columns, WINDOW), max(columns - WINDOW, 0)), strict=True)
        ],
        dim=1,
    )
    q = torch.randn(tokens, heads, 512, device="cuda")
    shape = (tokens, heads)
    return Call(
        q.to(torch.float8_e4m3fn) if query == "fp8" else q.bfloat16(),
        ColumnSet(pools[0], slots[:, :WINDOW]),
        ColumnSet(pools[1], slots[:, WINDOW:]) if columns > WINDOW else None,
        torch.randn(heads, device="cuda"),
        torch.empty(*shape, 512, dtype=torch.bfloat16, device="cuda"),
        torch.empty(*shape, device="cuda"),
        slots,
    )


def run(call: Call, pdl: bool) -> None:
    """As the public function launches; with `pdl` False, for a plain edge."""
    launch(
        call.q, call.window, call.topk, score_scale=DEFAULT_SM_SCALE, out_scale=1.0, sink=call.sink, out=call.out,
        lse=call.lse, pdl=pdl,
    )  # fmt: skip


def floor_of(layout: RecordLayout, columns: int, pdl: bool) -> Callable[[Call], None]:
    from cutlass.cute.runtime import make_fake_stream

    from benchmarks.sparse_mla_floor import GatherFloorKernel, fake_arguments
    from nvcomm.jit import compile_kernel

    key = (layout, -(-columns // 128), pdl)
    kernel = compile_kernel(GatherFloorKernel(*key), *fake_arguments(), make_fake_stream(), key=key)

    def run(call: Call) -> None:
        # Slots of the smaller pool are slots of the larger one too; which records are read does not matter here.
        pool = (call.topk or call.window).records
        kernel(
            call.slots.data_ptr(), call.slots.stride(0) * 4, pool.pages.data_ptr(), pool.page_stride_bytes,
            pool.block.bit_length() - 1, call.lse.data_ptr(), call.q.shape[0],
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    return run


def error_of(call: Call) -> float:
    """RMS error of what is in the output over the RMS of rounding the exact result to BF16; the output is NaN then."""
    sets = [
        (one.records, one.indices, reference.active_columns(one.indices, one.records.num_slots))
        for one in (call.window, call.topk)
        if one is not None
    ]
    exact, _ = reference.sparse_mla(call.q, sets, sm_scale=DEFAULT_SM_SCALE, sink=call.sink)
    rounding = (exact.bfloat16().float() - exact).square().mean().sqrt()
    error = (call.out.float() - exact).square().mean().sqrt()
    call.out.fill_(float("nan"))
    return float(error / rounding)


def make_pools(records: str) -> list[RecordView]:
    layout = next(layout for layout in LAYOUTS if layout.name == records)
    return [make_pool(layout, slots, block) for slots, block in zip(POOL_SLOTS, BLOCKS, strict=True)]


def make_pool(layout: RecordLayout, slots: int, block: int) -> RecordView:
    kv = torch.empty(slots // block, block, layout.record_bytes, dtype=torch.uint8, device="cuda")
    view = record_view(kv, block, layout)
    step = 1 << 15
    for first in range(0, slots, step):
        values = torch.randn(step, 512, device="cuda")
        reference.write_records(view, torch.arange(first, first + step, device="cuda"), values)
    return view
