# SPDX-License-Identifier: Apache-2.0
"""What every public function of `decode` asks of a tensor, and of the GPU that it lies on."""

from __future__ import annotations

import functools
import math
from numbers import Integral, Real

import torch

from nvcomm.errors import UnsupportedError
from nvcomm.jit import target_arch

OLDEST_ARCH = 90


def tensor_reasons(name: str, x: object) -> list[str]:
    """Why nobody can look at `x` any closer: it is no tensor, or none of plain strided memory. Empty if one can."""
    if not isinstance(x, torch.Tensor):
        return [f"{name} is a {type(x).__name__}, wanted a torch.Tensor"]
    if x.is_nested or x.layout != torch.strided:
        return [f"{name} is {'nested' if x.is_nested else x.layout}, wanted a dense tensor"]
    return []


def grad_reasons(name: str, x: torch.Tensor) -> list[str]:
    """Why a gradient would be lost without a word."""
    if x.requires_grad and torch.is_grad_enabled():
        return [f"{name} requires grad, and there is no backward: detach it, or use torch.no_grad()"]
    return []


def device_reasons(name: str, x: torch.Tensor) -> list[str]:
    """Why `x` lies where nothing here computes."""
    if x.device.type in {"cpu", "cuda"}:
        return []
    return [f"{name} is on {x.device}, wanted a CUDA GPU, or the CPU, where the reference answers: move it"]


def integer_reasons(name: str, x: object, lowest: int, highest: int) -> list[str]:
    """Why `x` is no integer from `lowest` to `highest`."""
    if isinstance(x, Integral) and not isinstance(x, bool) and lowest <= int(x) <= highest:
        return []
    return [f"{name} is {shown(x)}, wanted an integer from {lowest} to {highest}"]


def number_reasons(name: str, x: object) -> list[str]:
    """Why `x` is no finite number. A tensor is none: its value is on the device, and a launch takes the host's."""
    if isinstance(x, Real) and math.isfinite(x):
        return []
    return [f"{name} is {shown(x)}, wanted a finite number"]


def shown(x: object) -> str:
    """For a message: a tensor by its kind, since to print one may wait for the device."""
    return f"a {type(x).__name__}" if isinstance(x, torch.Tensor) else repr(x)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_target(op: str) -> None:
    """Raises UnsupportedError if the architecture to compile for has no clusters of CTAs."""
    arch = target_arch()
    if int("".join(filter(str.isdigit, arch))) < OLDEST_ARCH:
        raise UnsupportedError(f"{op} needs clusters of CTAs (sm_90 or newer), this is {arch}: use CPU tensors.")
