# SPDX-License-Identifier: Apache-2.0
"""Host time of a launch, and what loading costs: `python tests/kernel/measure_launch.py` on a machine with a GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit
from tests.kernel.test_jit import FillKernel, compile_fill, expect

LAUNCHES, ROUNDS = 200, 9
out = sys.stdout.write


def host_us(launch: Callable[[], object]) -> float:
    """Best mean over `LAUNCHES` launches in a row, in microseconds; the GPU keeps up with them."""
    means = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        means.append((time.perf_counter() - start) / LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return min(means)


def check(words: torch.Tensor) -> None:
    """Whether the launches that were timed did their work."""
    torch.cuda.synchronize()
    assert torch.equal(words.cpu(), expect(5, 1, 20, words.numel()))


def main() -> None:
    """Prints a table; lines that begin with # are about the machine."""
    words = torch.zeros(64, dtype=torch.int64, device="cuda")
    stream, addr = torch.cuda.current_stream().cuda_stream, words.data_ptr()
    out(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    start = time.perf_counter()
    fill = compile_fill(20)
    out(f"compile                                       {(time.perf_counter() - start) * 1e3:9.1f} ms\n")
    for name in ("preload", "preload again"):
        start = time.perf_counter()
        jit.preload(fill)
        out(f"{name:45s} {(time.perf_counter() - start) * 1e3:9.3f} ms\n")
    rows = {
        "CompiledKernel": lambda: fill([addr], 5, 1, 64, 1, stream),
        "its attribute launch": lambda: fill.launch([addr], 5, 1, 64, 1, stream),
        "with torch.cuda.current_stream()": lambda: fill([addr], 5, 1, 64, 1, torch.cuda.current_stream().cuda_stream),
        "torch.cuda.current_stream() alone": lambda: torch.cuda.current_stream().cuda_stream,
        "torch._C._cuda_getCurrentRawStream() alone": lambda: torch._C._cuda_getCurrentRawStream(0),
    }
    for count in (4, 8):
        several, addrs = compile_fill(20, count), [addr] * count
        jit.preload(several)
        rows[f"a list of {count} addresses"] = lambda k=several, a=addrs: k(a, 5, 1, 64, 1, stream)
    direct = cute.compile(FillKernel(20), [Int64(0)], Int64(0), Int32(0), Int32(0), Int32(1), make_fake_stream())
    handle = CUstream(stream)
    rows["the DSL's own call"] = lambda: direct([Int64(addr)], Int64(5), 1, 64, 1, handle)
    for name, launch in rows.items():
        words.zero_()
        us = host_us(launch)
        if "alone" not in name:
            check(words)
        out(f"{name:45s} {us:9.2f} us\n")
    graph = torch.cuda.CUDAGraph()
    words.zero_()
    with torch.cuda.graph(graph):
        capturing = torch.cuda.current_stream().cuda_stream
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            fill([addr], 5, 1, 64, 1, capturing)
        us = (time.perf_counter() - start) / LAUNCHES * 1e6
    graph.replay()
    check(words)
    out(f"{'while capturing':45s} {us:9.2f} us\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NVCOMM_CACHE_DIR"] = f"{folder}/kernels"
        main()
