# SPDX-License-Identifier: Apache-2.0
"""nvcomm.jit on a GPU: argument passing, graph capture, the disk cache in another process, and preload.

Preload has its negative control: the first launch of a kernel that was not loaded waits for a kernel that spins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64, Uint32  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from nvcomm import driver, jit  # noqa: E402
from nvcomm.errors import CudaError  # noqa: E402

pytestmark = pytest.mark.gpu


class FillKernel:
    """Writes `base + step * i` to 64-bit element i; `variant` only makes another kernel of it."""

    def __init__(self, variant: int = 0) -> None:
        self.variant = variant

    @cute.jit
    def __call__(self, outs: list[Int64], base: Int64, step: Int32, num_elems: Int32, ctas: Int32, stream):
        self.kernel(outs, base, step, num_elems).launch(grid=(ctas, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, outs: list[Int64], base: Int64, step: Int32, num_elems: Int32):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        i = cta * 128 + thread
        if i < num_elems:
            value = base + Int64(step) * Int64(i) + Int64(self.variant)
            for k in cutlass.range_constexpr(len(outs)):
                cute.arch.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[outs[k] + Int64(i) * 8, value])


class SpinKernel:
    """Spins until the word at `flag` is not 0, at most `limit_ns`."""

    @cute.jit
    def __call__(self, flag: Int64, limit_ns: Int64, stream):
        self.kernel(flag, limit_ns).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, flag: Int64, limit_ns: Int64):
        begin = cute.arch.globaltimer()
        now = begin
        word = Uint32(0)
        while (word == 0) & (now - begin < limit_ns):
            word = cute.arch.inline_ptx(
                "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[flag]
            )
            now = cute.arch.globaltimer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCOMM_CACHE_DIR", str(tmp_path / "cache"))
    torch.zeros(1, device="cuda")
    return tmp_path / "cache"


def compile_fill(variant: int, num_outs: int = 1):
    fake = ([Int64(0)] * num_outs, Int64(0), Int32(0), Int32(0), Int32(1), make_fake_stream())
    return jit.compile_kernel(FillKernel(variant), *fake, key=(variant, num_outs))


def expect(base, step, variant, count):
    return torch.arange(count, dtype=torch.int64) * step + base + variant


def test_integers_above_32_bits_travel_whole():
    out = torch.zeros(1000, dtype=torch.int64, device="cuda")
    assert out.data_ptr() > 2**32
    fill = compile_fill(1)
    base = 0x7EDC_BA98_7654_3210
    fill([out.data_ptr()], base, -3, 1000, 8, torch.cuda.current_stream().cuda_stream)
    assert torch.equal(out.cpu(), expect(base, -3, 1, 1000))


@pytest.mark.parametrize(("base", "step"), [(2**63, 0), (0, 2**31), (-(2**63) - 1, 0)])
def test_an_integer_that_does_not_fit_is_refused(base, step):
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    fill = compile_fill(1)
    with pytest.raises((ValueError, TypeError), match="argument"):
        fill([out.data_ptr()], base, step, 8, 1, 0)
    torch.cuda.synchronize()
    assert not out.any()


def test_a_launch_goes_to_the_stream_it_is_given():
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    fill, spin = compile_fill(2), jit.compile_kernel(SpinKernel(), Int64(0), Int64(0), make_fake_stream(), key=())
    jit.preload(fill)
    jit.preload(spin)
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    spin(flag.data_ptr(), 5_000_000_000, busy.cuda_stream)
    fill([out.data_ptr()], 5, 0, 8, 1, busy.cuda_stream)
    idle_event = idle.record_event()
    idle_event.synchronize()
    assert not busy.query(), "the launch did not wait behind the spinning kernel of its stream"
    flag.fill_(1)
    busy.synchronize()
    assert out.tolist() == [7] * 8


def test_capture_on_any_stream_and_replay():
    out = torch.zeros(256, dtype=torch.int64, device="cuda")
    fill = compile_fill(3)
    jit.preload(fill)
    graphs = []
    for base in (10, 20):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            fill([out.data_ptr()], base, 1, 256, 2, torch.cuda.current_stream().cuda_stream)
        graphs.append(graph)
    assert not out.any(), "a captured launch ran"
    for base, graph in zip((10, 20, 10), (*graphs, graphs[0]), strict=True):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), expect(base, 1, 3, 256))


def test_another_process_takes_the_kernel_from_the_disk(cache):
    fill = compile_fill(4)
    (entry,) = cache.glob("*.o")
    before = entry.stat().st_mtime_ns
    code = f"""
import sys, time; sys.path[:0] = {sys.path!r}
import importlib.util
spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})
module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
import cutlass.cute as cute, torch
def no(*args, **kwargs): raise AssertionError("compiled again")
cute.compile = no
out = torch.zeros(8, dtype=torch.int64, device="cuda")
start = time.perf_counter()
fill = module.compile_fill(4)
taken_ms = (time.perf_counter() - start) * 1e3
module.jit.preload(fill)
fill([out.data_ptr()], 6, 0, 8, 1, torch.cuda.current_stream().cuda_stream)
assert out.tolist() == [10] * 8, out
print("from disk in", round(taken_ms, 1), "ms", fill.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert fill.name in done.stdout
    assert entry.stat().st_mtime_ns == before
    assert Path(entry).stat().st_mode & 0o777 == 0o600


def launch_beside_a_spinning_kernel(fill, limit_ns):
    """Seconds that a launch, and the kernel behind it, take while another stream's kernel spins for `limit_ns`."""
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    spin = jit.compile_kernel(SpinKernel(), Int64(0), Int64(0), make_fake_stream(), key=())
    jit.preload(spin)
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    spin(flag.data_ptr(), limit_ns, busy.cuda_stream)
    start = time.perf_counter()
    fill([out.data_ptr()], 5, 0, 8, 1, idle.cuda_stream)
    idle.synchronize()
    took = time.perf_counter() - start
    still_spinning = not busy.query()
    flag.fill_(1)
    torch.cuda.synchronize()
    assert (out != 0).all()
    return took, still_spinning


def test_a_preloaded_kernel_runs_beside_one_that_spins():
    fill = compile_fill(5)
    assert jit.preload(fill) == 1
    took, still_spinning = launch_beside_a_spinning_kernel(fill, 4_000_000_000)
    assert still_spinning, f"the launch took {took:.3f} s: it waited for the spinning kernel"


def test_without_preload_the_first_launch_waits_for_the_kernel_that_spins():
    """The negative control: if this fails, CUDA no longer needs preload, or the test above proves nothing."""
    took, still_spinning = launch_beside_a_spinning_kernel(compile_fill(6), 1_000_000_000)
    assert not still_spinning, f"the launch took only {took:.3f} s"


def test_preload_launches_nothing_and_loads_what_it_says():
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    fill = compile_fill(7)
    assert jit.preload(fill, [out.data_ptr()], 5, 0, 8, 1) == 1
    torch.cuda.synchronize()
    assert not out.any()
    assert int(driver.call("cuCtxGetCurrent")) != 0


def test_a_launch_that_cuda_refuses_is_a_typed_error():
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    with pytest.raises(CudaError, match="cudaErrorInvalid"):
        compile_fill(8)([out.data_ptr()], 5, 0, 8, 0, 0)  # a grid of 0 CTAs
