# SPDX-License-Identifier: Apache-2.0
"""Registers and local memory are read out of a cubin's own tables."""

from __future__ import annotations

import pytest

cutlass = pytest.importorskip("cutlass")
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64, Uint32  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from nvcomm import cubin, jit  # noqa: E402
from nvcomm.errors import UnsupportedError  # noqa: E402
from tests.unit import compile_checks  # noqa: E402


class ArrayKernel:
    """Keeps 300 words and stores the one at a run-time place (local memory) or at a fixed one (registers)."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic

    @cute.jit
    def __call__(self, addr: Int64, place: Int32, stream):
        self.kernel(addr, place).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, addr: Int64, place: Int32):
        words = cute.make_rmem_tensor(300, Uint32)
        for i in cutlass.range(300, unroll_full=True):
            words[i] = cute.arch.inline_ptx(
                "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr + Int64(i) * 4]
            )
        word = words[3]
        if cutlass.const_expr(self.dynamic):
            word = words[place]
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word])


@pytest.fixture(scope="module")
def made():
    fake = (Int64(0), Int32(0), make_fake_stream())
    return {dynamic: jit.artifacts(ArrayKernel(dynamic), *fake, arch="sm_90a") for dynamic in (False, True)}


def test_local_memory_is_seen_in_the_tables_and_in_sass(made):
    (lean,), (local,) = (tuple(made[dynamic].usage.values()) for dynamic in (False, True))
    assert lean.frame_bytes == 0
    assert local.frame_bytes >= 64
    assert 0 < lean.registers <= 255
    if cubin.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    compile_checks.check_no_local_memory(cubin.disassemble(made[False].cubin))
    with pytest.raises(AssertionError, match="local memory"):
        compile_checks.check_no_local_memory(cubin.disassemble(made[True].cubin))


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        cubin.resource_usage(b"PTX")


def test_without_nvdisasm_the_error_names_the_package(made, monkeypatch):
    monkeypatch.setattr(cubin, "find_nvdisasm", lambda: None)
    with pytest.raises(UnsupportedError, match="nvidia-cuda-nvdisasm"):
        cubin.disassemble(made[False].cubin)
    monkeypatch.setattr(cubin, "find_nvdisasm", lambda: "/bin/false")
    with pytest.raises(UnsupportedError, match="failed with 1"):
        cubin.disassemble(made[False].cubin)
