# SPDX-License-Identifier: Apache-2.0
"""A caller's tensor as bytes, without a copy; what cannot be taken as it lies in memory is refused."""

from __future__ import annotations

import torch

from nvcomm.errors import UsageError
from nvcomm.host.words import Bytes


def input_bytes(x: torch.Tensor, max_bytes: int) -> Bytes:
    """The bytes of an input of at most `max_bytes`.

    Raises:
        UsageError: it is too large, or not a contiguous CPU tensor.
    """
    array = _bytes(x, "x")
    if len(array) > max_bytes:
        raise UsageError(f"x has {len(array)} bytes; this communicator was built for {max_bytes}: raise max_bytes.")
    return array


def output_bytes(out: torch.Tensor, num_bytes: int) -> Bytes:
    """The bytes of an output, which has to have `num_bytes`.

    Raises:
        UsageError: it has not, or is not a contiguous CPU tensor.
    """
    array = _bytes(out, "out")
    if len(array) != num_bytes:
        raise UsageError(f"out has {len(array)} bytes; wanted {num_bytes}.")
    return array


def _bytes(tensor: torch.Tensor, name: str) -> Bytes:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise UsageError(f"{name} is a {tensor.layout} tensor on {tensor.device}; wanted a contiguous one on the CPU.")
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"{name} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() first.")
    array: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
