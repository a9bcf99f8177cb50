# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode beside the floor of its gather, in one run on one GPU.

    python -m benchmarks.sparse_mla [--case plain_fp8:bf16:640 ...] [--tokens 1 6 12 24 48] [--heads 16]

Every call of a graph has its own query, lists and output, over pools of 0.7 to 1.3 GB; 300 MB are read before each
replay: what a call reads comes from HBM. Time of a call: median over the replays of (graph / calls). Outputs of the
first and last call are held to the reference: of a call before, and after it of the last timed replay.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.sparse_mla_calls import Call, error_of, floor_of, make_call, make_pools, run
from decode.kv_cache import LAYOUTS, PLAIN_FP8, RecordView

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
FLUSH_BYTES = 300 << 20


def main() -> int:
    """Prints the table; 1 if data was wrong."""
    options = parser().parse_args()
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
            pools = {records: make_pools(records)}
        for tokens in options.tokens:
            row, error = _measure(pools[records], query, columns, tokens, options.heads, flush)
            wrong += not error <= 2.0
            print(f"{records:10} {query:5} {columns:7} {tokens:6} | {row} | {error:4.2f}", flush=True)
    return 1 if wrong else 0


def _measure(
    pools: list[RecordView], query: str, columns: int, tokens: int, heads: int, flush: torch.Tensor
) -> tuple[str, float]:
    """A row of the table, and the error."""
    calls = [make_call(pools, query, columns, tokens, heads) for _ in range(CALLS)]
    for call in calls:
        run(call, pdl=True)
    errors = [error_of(calls[i]) for i in (0, -1)]
    layout, cells = pools[0].layout, []
    for pdl in (False, True):
        ours = _time(functools.partial(run, pdl=pdl), calls, flush)
        floor = _time(floor_of(layout, columns, pdl), calls, flush)
        cells.append(f"{ours:5.2f} {floor:5.2f} {ours - floor:4.2f}")
    has_bar = columns == 640 and layout == PLAIN_FP8 and heads == 16 and tokens in BARS_US
    bar = f"{BARS_US[tokens]:4.1f}" if has_bar else "   -"
    errors += [error_of(calls[i]) for i in (0, -1)]
    # Python's max may lose a NaN.
    return f"{' | '.join(cells)} | {bar}", float(torch.tensor(errors).max())


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


def _case(text: str) -> tuple[str, str, int]:
    records, query, columns = text.split(":")
    if records not in {layout.name for layout in LAYOUTS} or query not in {"bf16", "fp8"}:
        raise argparse.ArgumentTypeError(f"{text}: wanted RECORDS:QUERY:COLUMNS, such as {DEFAULT_CASES[0]}")
    return records, query, int(columns)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", type=_case, nargs="+", default=[_case(text) for text in DEFAULT_CASES])
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--tokens", type=int, nargs="+", default=[1, 6, 12, 24, 48])
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    sys.exit(main())
