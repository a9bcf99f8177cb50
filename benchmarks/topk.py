# SPDX-License-Identifier: Apache-2.0
"""Decode top-k on one GPU: every cell of rows x columns, hot and cold, beside the read floor and torch.topk.

    python -m benchmarks.topk --k 512 > topk.txt

Times are medians over replays of a CUDA graph of 20 calls, divided by 20. Hot: all calls on one buffer. Cold: each call
of the graph on its own buffer, and 268 MB read before the replay. Every output is checked before and after.
The floor reads each valid row once and has two cluster barriers, plain graph edges, best of 1 to 16 CTAs a row.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable

import torch

from decode.reference.topk import NEG_INF_KEY, block_keys, explain_mismatch, valid_keys
from decode.topk import launch
from decode.topk_config import BLOCK_COLUMNS, NUM_BLOCKS_SELECTED, TopkConfig, choose_config

CALLS = 20
COLUMNS = (65_536, 262_144, 524_288, 1_048_576)
ROWS = (1, 6, 12, 24, 48, 64)
FLUSH_BYTES = 268_435_456


def median_us(calls: list[Callable[[], None]], replays: int, before: Callable[[], None] | None = None) -> float:
    """Microseconds per call, median over replays of one graph of all `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(replays + 2):
            if before is not None:
                before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times[2:])[replays // 2]


def floor_us(logits: torch.Tensor, columns: int, clusters: tuple[int, ...], replays: int) -> tuple[float, int]:
    """The read floor of (rows, columns), and the cluster size that gave it."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from benchmarks.topk_floor import FloorKernel
    from nvcomm.jit import compile_kernel

    rows = logits.shape[0]
    scratch = torch.empty(rows * 16 * 32, dtype=torch.int32, device="cuda")
    best = (float("inf"), 0)
    for cluster in clusters:
        config = TopkConfig(512, cluster, pdl="off")
        kernel = compile_kernel(
            FloorKernel(config), *[Int64(0)] * 3, *[Int32(1)] * 2, make_fake_stream(), key=(config,)
        )

        def call(kernel: Callable[..., None] = kernel) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            kernel(logits.data_ptr(), scratch.data_ptr(), logits.stride(0) * 2, rows, columns, stream)

        best = min(best, (median_us([call] * CALLS, replays), cluster))
    return best


class Cell:
    """One cell: rows of `columns`, of which `valid` count."""

    def __init__(self, pool: torch.Tensor, rows: int, columns: int, valid: int, k: int) -> None:
        self.k, self.valid = k, valid
        size = rows * columns
        self.buffers = [pool[i * size : (i + 1) * size].view(rows, columns) for i in range(CALLS)]
        self.lengths = torch.full((rows,), valid, dtype=torch.int32, device="cuda")
        self.out = torch.empty(rows, k, dtype=torch.int32, device="cuda")

    def calls(self, config: TopkConfig, *, cold: bool) -> list[Callable[[], None]]:
        """The 20 calls of a graph."""
        buffers = self.buffers if cold else self.buffers[:1] * CALLS
        return [lambda b=b: launch(config, b, self.lengths, self.out) for b in buffers]

    def check(self, config: TopkConfig) -> None:
        """Raises if the kernel's selection from the first buffer is wrong."""
        self.out.fill_(-7)
        launch(config, self.buffers[0], self.lengths, self.out)
        logits = self.buffers[0][:, : self.valid]
        if config.mode == "blocks":
            keys = block_keys(logits, self.lengths)
            keys[keys == NEG_INF_KEY] = 0
            keys[:, -1] = 1 << 17  # pinned: above all others
        else:
            keys = valid_keys(logits, self.lengths)
        wrong = explain_mismatch(keys, self.k, self.out)
        if wrong:
            raise SystemExit(f"{config}, {tuple(self.buffers[0].shape)}, {self.valid} valid: {wrong}")

    def time(self, config: TopkConfig, replays: int, *, cold: bool) -> float:
        """Microseconds per call, checked before and after."""
        self.check(config)
        before = flush if cold else None
        result = median_us(self.calls(config, cold=cold), replays, before)
        self.check(config)
        return result

    def flashinfer_us(self, library: ctypes.CDLL, replays: int) -> float:
        """FlashInfer's cluster top-k, hot, with the settings its Python layer takes; checked before.

        It takes the row's length from the host: here it is told the valid one.
        """
        logits = self.buffers[0]
        rows, clusters = logits.shape[0], 8 if logits.shape[0] <= 32 else 4
        optin = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        num_cached = (optin // 2 - 4 * (self.k + 781) - 1024) // 16
        overflow = torch.empty(4 * rows * self.valid, dtype=torch.int32, device="cuda")
        library.flashinfer_topk.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_void_p]
        library.flashinfer_topk.argtypes += [ctypes.c_int] * 5 + [ctypes.c_void_p]

        def call() -> None:
            code = library.flashinfer_topk(
                logits.data_ptr(), self.out.data_ptr(), self.valid, overflow.data_ptr(), rows, logits.stride(0),
                self.k, num_cached, clusters, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            if code:
                raise RuntimeError(f"flashinfer_topk returned CUDA error {code}")

        call()
        wrong = explain_mismatch(valid_keys(logits[:, : self.valid], self.lengths), self.k, self.out)
        return float("nan") if wrong else median_us([call] * CALLS, replays)

    def torch_us(self, replays: int, mode: str) -> float:
        """`torch.topk` on the valid columns, hot; in block mode behind the maxima of the blocks."""
        view = self.buffers[0][:, : self.valid]
        blocks = view.unflatten(1, (-1, BLOCK_COLUMNS))

        def call() -> None:
            values = blocks.amax(2) if mode == "blocks" else view
            torch.topk(values, min(self.k, values.shape[1]), dim=1)

        return median_us([call] * 3, replays)


def flush() -> None:
    """Reads more than the L2 cache holds."""
    flush_buffer().sum()


@functools.cache
def flush_buffer() -> torch.Tensor:
    """What `flush` reads."""
    return torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def make_pool(num_elements: int) -> torch.Tensor:
    """Random normal BF16 values."""
    pool = torch.empty(num_elements, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    return pool


def variants(
    rows: int, columns: int, clusters: str, threads: str, k: int, mode: str, *, no_pdl: bool
) -> list[TopkConfig]:
    """The configurations asked for: "auto" is what the public functions take."""
    auto = choose_config(
        rows, columns, k, mode="blocks" if mode == "blocks" else "columns", deterministic=mode == "deterministic"
    )
    if no_pdl:
        auto = dataclasses.replace(auto, pdl="off")
    if clusters == "auto":
        return [auto]
    found = []
    for cluster in (int(c) for c in clusters.split(",")):
        for num_threads in (int(t) for t in threads.split(",")):
            batches = -(-columns // (64 * num_threads * cluster))
            if batches * num_threads * 8 <= 65536:
                found.append(dataclasses.replace(auto, cluster=cluster, threads=num_threads, batches=batches))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--mode", choices=("columns", "deterministic", "blocks"), default="columns")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--columns", default=",".join(map(str, COLUMNS)))
    parser.add_argument("--valid", default="8,1", help="1/n of the columns")
    parser.add_argument("--clusters", default="auto", help="CTAs a row, comma-separated")
    parser.add_argument("--threads", default="1024")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--no-cold", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument("--flashinfer", help="shared library made of benchmarks/flashinfer_topk.cu")
    args = parser.parse_args()
    if args.mode == "blocks":
        args.k = NUM_BLOCKS_SELECTED
    flashinfer = ctypes.CDLL(args.flashinfer) if args.flashinfer else None
    rows_list = [int(r) for r in args.rows.split(",")]
    columns_list = [int(c) for c in args.columns.split(",")]
    say = sys.stdout.write
    pool = make_pool(max(rows_list) * max(columns_list) * CALLS)
    say(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.mode}, k={args.k}, us per call\n")
    say("# columns valid rows | floor (CTAs) bar | variant hot cold | torch.topk | flashinfer | lost\n")
    for columns in columns_list:
        for share in (int(v) for v in args.valid.split(",")):
            for rows in rows_list:
                cell = Cell(pool, rows, columns, columns // share, args.k)
                line = f"{columns:8d} 1/{share} {rows:3d} |"
                bar = None
                if not args.no_floor:
                    floor, cluster = floor_us(cell.buffers[0], columns // share, (1, 2, 4, 8, 16), args.replays)
                    bar = floor + 3
                    line += f" {floor:6.2f} ({cluster:2d}) {bar:6.2f} |"
                lost = []
                for config in variants(
                    rows, columns, args.clusters, args.threads, args.k, args.mode, no_pdl=args.no_pdl
                ):
                    hot = cell.time(config, args.replays, cold=False)
                    cold = float("nan") if args.no_cold else cell.time(config, args.replays, cold=True)
                    line += f" {config.cluster}x{config.threads} {hot:6.2f} {cold:6.2f} |"
                    if bar is not None and hot > bar:
                        lost.append("bar")
                if not args.no_torch:
                    torch_us = cell.torch_us(5, args.mode)
                    line += f" {torch_us:8.1f} |"
                    if hot > torch_us:
                        lost.append("torch")
                if flashinfer is not None:
                    flashinfer_us = cell.flashinfer_us(flashinfer, args.replays)
                    line += f" {flashinfer_us:6.2f} |"
                    if hot > flashinfer_us:
                        lost.append("flashinfer")
                say(f"{line} {' '.join(sorted(set(lost)))}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
