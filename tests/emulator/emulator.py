# SPDX-License-Identifier: Apache-2.0
"""Runs a CuTe DSL kernel on the CPU: its PTX as C++, a fiber a thread. For tests on machines without a GPU.

It shows that a kernel computes the right thing whatever the order of its warps and the delay of its asynchronous
stores, touches nothing out of bounds and does not wait for ever. It does not show that fences are sufficient: memory
here is sequentially consistent, apart from asynchronous stores.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvcomm import jit
from tests.emulator.transpile import transpile

_HERE = Path(__file__).parent


class EmulationError(Exception):
    """The kernel did something that it must not do; the message says which thread and which statement of the PTX."""


class EmulatedKernel:
    """One compiled variant of a kernel.

    Args:
        kernel: the kernel object.
        fake_args: what it is compiled with, the stream last.
        cluster: CTAs of a cluster.
        threads: threads of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        mutate: changes the PTX, for tests of the emulator.
    """

    def __init__(
        self,
        kernel: Any,
        fake_args: tuple[Any, ...],
        *,
        cluster: int,
        threads: int,
        shared_bytes: int,
        mutate: Callable[[str], str] = str,
    ) -> None:
        self.cluster, self.threads, self.shared_bytes = cluster, threads, shared_bytes
        self.ptx = mutate(jit.artifacts(kernel, *fake_args, arch="sm_90a").ptx)
        # The folder lives as long as the kernel: the library is mapped from it.
        self._folder = tempfile.TemporaryDirectory(prefix="nvcomm-emulator-")
        source = Path(self._folder.name) / "kernel.cpp"
        source.write_text(transpile(self.ptx))
        library = source.with_suffix(".so")
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", f"-I{_HERE}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._emulate = ctypes.CDLL(str(library)).emulate

    def __call__(
        self, grid: int, params: list[int], reads: list[torch.Tensor], writes: list[torch.Tensor], seed: int = 0
    ) -> None:
        """Runs `grid` CTAs.

        Args:
            grid: CTAs, a multiple of the cluster.
            params: the GPU function's parameters.
            reads: CPU tensors whose storage may be read.
            writes: CPU tensors whose storage may be read and written.
            seed: of the order of warps and of the delays.

        Raises:
            EmulationError: a wrong access, lanes that part before a warp instruction, a deadlock.
        """
        ranges: list[int] = []
        for tensor, writable in [(t, 0) for t in reads] + [(t, 1) for t in writes]:
            begin = tensor.data_ptr()
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            ranges += [begin, begin + extent * tensor.element_size() * (tensor.numel() > 0), writable]
        error = ctypes.create_string_buffer(500)
        failed = self._emulate(
            ctypes.c_int(grid),
            ctypes.c_int(self.cluster),
            ctypes.c_int(self.threads),
            (ctypes.c_uint64 * (len(params) + 1))(self.shared_bytes, *params),
            (ctypes.c_uint64 * len(ranges))(*ranges),
            ctypes.c_int(len(ranges) // 3),
            ctypes.c_uint(seed),
            error,
            ctypes.c_int(len(error)),
        )
        if failed:
            raise EmulationError(error.value.decode())
