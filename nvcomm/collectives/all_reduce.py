# SPDX-License-Identifier: Apache-2.0
"""All-reduce and reduce-scatter of one rank: which protocol, which kernel, how it is launched.

LL moves world_size times the input through every mailbox and waits once; two-shot moves twice the input and waits
twice. Small inputs take LL, large ones two-shot. Both find the same bits (docs/mailbox.md R13), so the choice is one of
time alone; every rank makes the same one, because it depends on nothing but the size and the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from nvcomm import jit, mailbox
from nvcomm.arguments import check_reduction
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_ll import AllReduceLLKernel
from nvcomm.collectives.all_reduce_tree import ELEM_BYTES, Dtype
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.collectives.mailbox_kernel import MailboxKernel, load
from nvcomm.collectives.reduce_scatter import ReduceScatterKernel
from nvcomm.collectives.tensors import access_bytes
from nvcomm.device import WARP
from nvcomm.env import settings
from nvcomm.errors import UsageError
from nvcomm.mailbox import CHUNK_BYTES, MailboxLayout
from nvcomm.options import Options

# (operation, dtype, kernel, its work, clusters): adds the handle, what the call says of itself, and the stream.
Launcher = Callable[[str, torch.dtype, jit.CompiledKernel, tuple[Any, ...], int], None]
ReduceProtocol = Literal["auto", "ll", "two_shot"]
ReduceOp = Literal["all_reduce", "reduce_scatter"]
DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
THREADS = 128  # a row of 5,120 bf16 then spreads over 5 multiprocessors

# World size -> bytes of input from which two-shot is the faster one: measured for two ranks over NVLink and for four,
# six and eight on one H200 (docs/results/all_reduce.md), between them for the others. Two ranks move as much by either
# protocol, and LL waits once.
_NEVER = 1 << 31
SWITCH_BYTES = {1: _NEVER, 2: _NEVER, 3: 256 << 10, 4: 144 << 10, 5: 96 << 10, 6: 64 << 10, 7: 56 << 10, 8: 48 << 10}

_KERNELS: dict[ReduceOp, tuple[type[MailboxKernel], ...]] = {
    "all_reduce": (AllReduceLLKernel, AllReduceTwoShotKernel),
    "reduce_scatter": (ReduceScatterKernel,),
}


def choose(
    protocol: ReduceProtocol, num_bytes: int, world_size: int, switch_bytes: dict[int, int] = SWITCH_BYTES
) -> Literal["ll", "two_shot"]:
    """The protocol of an all-reduce of `num_bytes`.

    Raises:
        UsageError: there is no such protocol.
    """
    if protocol not in get_args(ReduceProtocol):
        raise UsageError(f"protocol is {protocol!r}; wanted: one of {get_args(ReduceProtocol)}.")
    if protocol != "auto":
        return protocol
    return "two_shot" if num_bytes >= switch_bytes[world_size] else "ll"


def kernel_keys(op: ReduceOp, dtype: Dtype) -> list[tuple[type[MailboxKernel], Dtype, int]]:
    """(class, dtype, bytes of an access) of every kernel that `op` may launch on `dtype`."""
    return [(kernel, dtype, width) for kernel in _KERNELS[op] for width in (CHUNK_BYTES, ELEM_BYTES[dtype])]


def kernel_config(
    kernel: type[MailboxKernel], dtype: Dtype, width: int, layout: MailboxLayout, options: Options, *, multicast: bool
) -> ReduceConfig:
    """What a rank compiles `kernel` for, here or ahead of time (`nvcomm compile`)."""
    multicast = multicast and kernel is not ReduceScatterKernel  # whose every word goes to one rank
    return ReduceConfig(
        layout, dtype, width, multicast, options.pdl, THREADS, options.protocol != "copy",
        device_checks=settings().device_checks > 0, delayed=options.transport == "delayed",
    )  # fmt: skip


class Reductions:
    """The reducing kernels of one rank, compiled and loaded when first asked for."""

    def __init__(
        self, layout: MailboxLayout, options: Options, *, places: Callable[[int], int], multicast: bool,
        launcher: Launcher,
    ) -> None:  # fmt: skip
        """Compiles nothing yet.

        Args:
            layout: the mailbox.
            options: the communicator's.
            places: CTAs a rank may launch (R8) of a kernel of which so many fit one multiprocessor.
            multicast: whether there is a multicast pointer.
            launcher: how the engine launches.
        """
        self._layout = layout
        self._options = options
        self._max_ctas = places(ReduceConfig(layout, "bf16", threads=THREADS).ctas_per_sm)
        self._multicast = multicast
        self._launcher = launcher
        self._kernels: dict[tuple[type[MailboxKernel], Dtype, int], jit.CompiledKernel] = {}

    def ready(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether every kernel of `op` on `dtype` is loaded."""
        return all(key in self._kernels for key in self._keys(op, dtype))

    def prepare(self, op: ReduceOp, dtype: torch.dtype) -> None:
        """Compiles and loads the kernels of `op` on `dtype`. Waits for the device: nothing may spin on it (R9).

        Raises:
            UsageError: the dtype has no sum here.
        """
        for key in self._keys(op, dtype):
            if key not in self._kernels:
                kernel, name, width = key
                config = kernel_config(kernel, name, width, self._layout, self._options, multicast=self._multicast)
                self._kernels[key] = load(kernel(config))

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, protocol: ReduceProtocol) -> None:
        """Launches an all-reduce of checked tensors."""
        world_size = self._layout.world_size
        chosen = choose(protocol, x.nbytes, world_size)
        kernel, chunks_a_thread = {"ll": (AllReduceLLKernel, 1), "two_shot": (AllReduceTwoShotKernel, world_size)}[
            chosen
        ]
        launch = self._kernel(kernel, x, out, x.nbytes)
        # a warp of the two-shot kernel takes whole spans of 32 chunks of each owner
        warps = math.ceil(mailbox.num_chunks(x.nbytes) / (WARP * chunks_a_thread))
        ctas = min(self._max_ctas, math.ceil(warps / (THREADS // WARP)))
        self._launcher(f"all_reduce {chosen}", x.dtype, launch, (x.data_ptr(), out.data_ptr(), x.nbytes), ctas)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launches a reduce-scatter of checked tensors; `x` has at least one row of at least one element."""
        rows, row_bytes = x.shape[0], x.nbytes // x.shape[0]
        launch = self._kernel(ReduceScatterKernel, x, out, row_bytes)
        largest = math.ceil(rows / self._layout.world_size) * row_bytes
        ctas = min(self._max_ctas, math.ceil(mailbox.num_chunks(largest) / THREADS))
        self._launcher("reduce_scatter", x.dtype, launch, (x.data_ptr(), out.data_ptr(), rows, row_bytes), ctas)

    def _kernel(
        self, kernel: type[MailboxKernel], x: torch.Tensor, out: torch.Tensor, granule: int
    ) -> jit.CompiledKernel:
        dtype = DTYPES[x.dtype]
        aligned = access_bytes(x.data_ptr(), out.data_ptr(), granule) == CHUNK_BYTES
        return self._kernels[kernel, dtype, CHUNK_BYTES if aligned else ELEM_BYTES[dtype]]

    def _keys(self, op: ReduceOp, dtype: torch.dtype) -> list[tuple[type[MailboxKernel], Dtype, int]]:
        check_reduction(op, dtype)
        return kernel_keys(op, DTYPES[dtype])
