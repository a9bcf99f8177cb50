# SPDX-License-Identifier: Apache-2.0
"""vLLM's custom all-reduce as a contender: its kernels, in a library made of benchmarks/vllm_all_reduce.cu.

They read inputs and flags of other ranks from memory that vLLM shares by CUDA IPC; here it is symmetric memory. As for
that, the copy that puts an ordinary tensor there is left out; vLLM leaves it out too, where a graph is captured.
"""

from __future__ import annotations

import ctypes

import torch

from nvcomm.bench.contender import Contender
from nvcomm.bench.plan import Plan
from nvcomm.bench.symmetric_memory import SharedInput
from nvcomm.errors import UnsupportedError
from nvcomm.group import StoreGroup

_RANK_DATA_BYTES = 128
_KEPT: list[object] = []  # what the kernels work on, for as long as the process
_PACK = 8  # elements of bf16 that a thread loads at once


def vllm_contender(plan: Plan, group: StoreGroup, device: torch.device, most_bytes: int) -> Contender:
    """Loads `plan.vllm_library`. Collective.

    Raises:
        UnsupportedError: it cannot be loaded, or refuses this many ranks.
    """
    try:
        library = ctypes.CDLL(str(plan.vllm_library))
    except OSError as error:
        raise UnsupportedError(
            f"--vllm-library {plan.vllm_library}: {error}. benchmarks/vllm_all_reduce.cu says how to build it."
        ) from error
    library.vllm_create.restype = ctypes.c_void_p
    library.vllm_all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    shared = SharedInput(plan, group, device, most_bytes)
    signals = SharedInput(plan, group, device, library.vllm_signal_bytes() + most_bytes)
    signals.buffer.zero_()
    rank_data = torch.zeros(_RANK_DATA_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    group.barrier("nvcomm.bench.vllm", plan.timeout_s)
    pointers = ctypes.c_void_p * group.world_size
    handle = library.vllm_create(
        *(pointers(*signals.pointers), pointers(*shared.pointers), ctypes.c_void_p(rank_data.data_ptr())),
        *(group.rank, group.world_size),
    )
    if not handle:
        raise UnsupportedError(f"--vllm-library {plan.vllm_library}: it could not be set up.")

    def all_reduce(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel() % _PACK:
            raise RuntimeError(f"wants a multiple of {2 * _PACK} bytes")
        stream = torch.cuda.current_stream(device).cuda_stream
        code = library.vllm_all_reduce(handle, out.data_ptr(), x.numel(), stream)
        if code:
            raise RuntimeError(f"CUDA error {code}")

    _KEPT.append((rank_data, signals))
    return Contender("vllm", shared.loaded(all_reduce), all_reduce, shared.load)
