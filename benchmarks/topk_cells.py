# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/topk.py measures: a cell of rows x columns, by our kernel, its floor, torch.topk and FlashInfer's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from decode.reference.topk import NEG_INF_KEY, block_keys, explain_mismatch, valid_keys
from decode.topk import launch
from decode.topk_config import BLOCK_COLUMNS, TopkConfig

CALLS = 20
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

    def check(self, config: TopkConfig, buffer: torch.Tensor) -> None:
        """Raises unless the output is the selection from `buffer`."""
        logits = buffer[:, : self.valid]
        if config.mode == "blocks":
            keys = block_keys(logits, self.lengths)
            keys[keys == NEG_INF_KEY] = 0
            keys[:, -1] = 1 << 17  # pinned: above all others
        else:
            keys = valid_keys(logits, self.lengths)
        wrong = explain_mismatch(keys, self.k, self.out)
        if wrong:
            raise SystemExit(f"{config}, {tuple(buffer.shape)}, {self.valid} valid: {wrong}")

    def time(self, config: TopkConfig, replays: int, *, cold: bool) -> float:
        """Microseconds per call. A first call is checked before, and what the last timed call has left after."""
        self.out.fill_(-7)
        launch(config, self.buffers[0], self.lengths, self.out)
        self.check(config, self.buffers[0])
        self.out.fill_(-7)
        result = median_us(self.calls(config, cold=cold), replays, flush if cold else None)
        self.check(config, self.buffers[-1] if cold else self.buffers[0])
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
