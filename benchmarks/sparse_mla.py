# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode beside the floor of its gather, in one run on one GPU.

    python -m benchmarks.sparse_mla [--case plain_fp8:bf16:640 ...] [--tokens 1 6 12 24 48] [--heads 16]

Every call of a graph has its own query, lists and output, over pools of 0.7 to 1.3 GB; 300 MB are read before each
replay: what a call reads comes from HBM. Time of a call: median over the replays of (graph / calls). Outputs of the
first and last call are held to the reference before and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable

import torch

from decode.kv_cache import LAYOUTS, PLAIN_FP8, RecordLayout, RecordView, record_view
from decode.reference import sparse_mla as reference
from decode.sparse_mla import DEFAULT_SM_SCALE, ColumnSet
from decode.sparse_mla_launch import launch

DEFAULT_CASES = (
    "plain_fp8:bf16:640",
    "plain_fp8:fp8:640",
    "plain_fp8:bf16:128",
    "scaled_fp8:bf16:640",
    "bf16:bf16:640",
)
BARS_US = {1: 6.5, 6: 7.0, 12: 7.5, 24: 9.5, 48: 14.0}
CALLS = 40
REPLAYS = 15
WINDOW = 128
POOL_SLOTS = (1 << 18, 1 << 20)
BLOCKS = (32, 128)
FLUSH_BYTES = 300 << 20


def main() -> int:
    """Prints the table; 1 if data was wrong."""
    options = _parse()
    torch.manual_seed(options.seed)
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    print(f"# {torch.cuda.get_device_name()}, {options.heads} heads")
    print(
        "# us per call, `plain` and `pdl` edges in the graph; err: RMS error over that of rounding to BF16, at most 2"
    )
    print("records    query columns tokens | plain floor    + |   pdl floor    + |  bar |  err")
    wrong, pools = 0, {}
    for records, query, columns in options.case:
        if records not in pools:
            pools = {records: _pools(records)}
        for tokens in options.tokens:
            row, error = _measure(pools[records], query, columns, tokens, options.heads, flush)
            wrong += not error <= 2.0
            print(f"{records:10} {query:5} {columns:7} {tokens:6} | {row} | {error:4.2f}", flush=True)
    return 1 if wrong else 0


def _measure(
    pools: list[RecordView], query: str, columns: int, tokens: int, heads: int, flush: torch.Tensor
) -> tuple[str, float]:
    """A row of the table, and the error."""
    calls = [_call(pools, query, columns, tokens, heads) for _ in range(CALLS)]
    error = max(_error(calls[i]) for i in (0, -1))
    layout, cells = pools[0].layout, []
    for pdl in (False, True):
        ours = _time(functools.partial(_run, pdl=pdl), calls, flush)
        floor = _time(_floor(layout, columns, pdl), calls, flush)
        cells.append(f"{ours:5.2f} {floor:5.2f} {ours - floor:4.2f}")
    has_bar = columns == 640 and layout == PLAIN_FP8 and heads == 16 and tokens in BARS_US
    bar = f"{BARS_US[tokens]:4.1f}" if has_bar else "   -"
    return f"{' | '.join(cells)} | {bar}", max(error, *(_error(calls[i]) for i in (0, -1)))


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


def _call(pools: list[RecordView], query: str, columns: int, tokens: int, heads: int) -> Call:
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


def _run(call: Call, pdl: bool) -> None:
    """As the public function launches; with `pdl` False, for a plain edge."""
    launch(
        call.q, call.window, call.topk, score_scale=DEFAULT_SM_SCALE, out_scale=1.0, sink=call.sink, out=call.out,
        lse=call.lse, pdl=pdl,
    )  # fmt: skip


def _floor(layout: RecordLayout, columns: int, pdl: bool) -> Callable[[Call], None]:
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


def _time(run: Callable[[Call], None], calls: list[Call], flush: torch.Tensor) -> float:
    """Microseconds of a call."""
    run(calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            run(call)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(REPLAYS):
        flush.sum()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples)


def _error(call: Call) -> float:
    """RMS error of a fresh call over the RMS of rounding the exact result to BF16."""
    call.out.fill_(float("nan"))
    _run(call, pdl=True)
    sets = [
        (one.records, one.indices, reference.active_columns(one.indices, one.records.num_slots))
        for one in (call.window, call.topk)
        if one is not None
    ]
    exact, _ = reference.sparse_mla(call.q, sets, sm_scale=DEFAULT_SM_SCALE, sink=call.sink)
    rounding = (exact.bfloat16().float() - exact).square().mean().sqrt()
    return float((call.out.float() - exact).square().mean().sqrt() / rounding)


def _pools(records: str) -> list[RecordView]:
    layout = next(layout for layout in LAYOUTS if layout.name == records)
    return [_pool(layout, slots, block) for slots, block in zip(POOL_SLOTS, BLOCKS, strict=True)]


def _pool(layout: RecordLayout, slots: int, block: int) -> RecordView:
    kv = torch.empty(slots // block, block, layout.record_bytes, dtype=torch.uint8, device="cuda")
    view = record_view(kv, block, layout)
    step = 1 << 15
    for first in range(0, slots, step):
        values = torch.randn(step, 512, device="cuda")
        reference.write_records(view, torch.arange(first, first + step, device="cuda"), values)
    return view


def _case(text: str) -> tuple[str, str, int]:
    records, query, columns = text.split(":")
    if records not in {layout.name for layout in LAYOUTS} or query not in {"bf16", "fp8"}:
        raise argparse.ArgumentTypeError(f"{text}: wanted RECORDS:QUERY:COLUMNS, such as {DEFAULT_CASES[0]}")
    return records, query, int(columns)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=_case, nargs="+", default=[_case(text) for text in DEFAULT_CASES])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 6, 12, 24, 48])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
