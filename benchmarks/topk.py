# SPDX-License-Identifier: Apache-2.0
"""Decode top-k on one GPU: every cell of rows x columns, hot and cold, beside the read floor and torch.topk.

    python -m benchmarks.topk --k 512 > topk.txt

Times are medians over replays of a CUDA graph of 20 calls, divided by 20. Hot: all calls on one buffer. Cold: each call
of the graph on its own buffer, and 268 MB read before the replay. A first call is checked before, and after it what the
last timed call has left. The floor reads each valid row once and has two cluster barriers, plain graph edges, best of 1
to 16 CTAs a row.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools

import torch

from benchmarks.topk_cells import CALLS, Cell, floor_us, make_pool
from decode.arguments import num_sms
from decode.topk_config import (
    MAX_STEPS,
    NUM_BLOCKS_SELECTED,
    UNROLL,
    VECTOR_COLUMNS,
    Mode,
    TopkConfig,
    choose_config,
)

COLUMNS = (65_536, 262_144, 524_288, 1_048_576)
ROWS = (1, 6, 12, 24, 48, 64)
CLUSTERS = (1, 2, 4, 8, 16)
BAR_US = 3.0  # above the floor


def main() -> None:
    """Prints the table."""
    args = parser().parse_args()
    if args.mode == "blocks":
        args.k = NUM_BLOCKS_SELECTED
    flashinfer = ctypes.CDLL(args.flashinfer) if args.flashinfer else None
    pool = make_pool(max(args.rows) * max(args.columns) * CALLS)
    say(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.mode}, k={args.k}, us per call")
    say("# columns valid rows | floor (CTAs) bar | variant hot cold | torch.topk | flashinfer | lost")
    for columns, share, rows in itertools.product(args.columns, args.valid, args.rows):
        cell = Cell(pool, rows, columns, columns // share, args.k)
        say(f"{columns:8d} 1/{share} {rows:3d} | {measure(cell, args, flashinfer)}")


def measure(cell: Cell, args: argparse.Namespace, flashinfer: ctypes.CDLL | None) -> str:
    """The rest of a cell's line: its times, and what any of the variants loses to."""
    rows, columns = cell.buffers[0].shape
    line, peers, hot_times = "", {}, []
    if not args.no_floor:
        floor, cluster = floor_us(cell.buffers[0], cell.valid, CLUSTERS, args.replays)
        peers["bar"] = floor + BAR_US
        line += f"{floor:6.2f} ({cluster:2d}) {peers['bar']:6.2f} | "
    for config in variants(rows, columns, args, num_sms(cell.out.device)):
        hot_times.append(cell.time(config, args.replays, cold=False))
        cold = float("nan") if args.no_cold else cell.time(config, args.replays, cold=True)
        line += f"{config.cluster}x{config.threads} {hot_times[-1]:6.2f} {cold:6.2f} | "
    if not args.no_torch:
        peers["torch"] = cell.torch_us(5, args.mode)
        line += f"{peers['torch']:8.1f} | "
    if flashinfer is not None:
        peers["flashinfer"] = cell.flashinfer_us(flashinfer, args.replays)
        line += f"{peers['flashinfer']:6.2f} | "
    return line + " ".join(name for name, us in peers.items() if any(hot > us for hot in hot_times))


def variants(rows: int, columns: int, args: argparse.Namespace, sms: int) -> list[TopkConfig]:
    """The configurations asked for that can hold such rows; "auto" is what the public functions take."""
    mode: Mode = "blocks" if args.mode == "blocks" else "columns"
    auto = choose_config(rows, columns, args.k, mode=mode, deterministic=args.mode == "deterministic", num_sms=sms)
    if args.no_pdl:
        auto = dataclasses.replace(auto, pdl="off")
    if args.clusters == "auto":
        return [auto]
    found = []
    for cluster, threads in itertools.product(numbers(args.clusters), args.threads):
        batches = -(-columns // (UNROLL * VECTOR_COLUMNS * threads * cluster))
        if batches * UNROLL * threads <= MAX_STEPS:
            found.append(dataclasses.replace(auto, cluster=cluster, threads=threads, batches=batches))
    return found


def numbers(text: str) -> list[int]:
    """Comma-separated numbers."""
    return [int(part) for part in text.split(",")]


def say(line: str) -> None:
    """Prints a line at once: a run takes minutes."""
    print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--k", type=int, default=512)
    made.add_argument("--mode", choices=("columns", "deterministic", "blocks"), default="columns")
    made.add_argument("--rows", type=numbers, default=ROWS)
    made.add_argument("--columns", type=numbers, default=COLUMNS)
    made.add_argument("--valid", type=numbers, default=(8, 1), help="1/n of the columns")
    made.add_argument("--clusters", default="auto", help="CTAs a row, comma-separated")
    made.add_argument("--threads", type=numbers, default=(1024,))
    made.add_argument("--no-pdl", action="store_true")
    made.add_argument("--replays", type=int, default=15)
    made.add_argument("--no-cold", action="store_true")
    made.add_argument("--no-torch", action="store_true")
    made.add_argument("--no-floor", action="store_true")
    made.add_argument("--flashinfer", help="shared library made of benchmarks/flashinfer_topk.cu")
    return made


if __name__ == "__main__":
    main()
