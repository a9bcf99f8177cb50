# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands to a collective, before anything is launched."""

from __future__ import annotations

import torch

from nvcomm.errors import UsageError

REDUCED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_input(x: torch.Tensor, device: torch.device, max_bytes: int, op: str) -> None:
    """Raises UsageError unless `x` is a dense, contiguous tensor on `device` of at most `max_bytes`."""
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{op}: got a {type(x).__name__}; wanted a torch.Tensor.")
    if x.is_nested:
        raise UsageError(f"{op}: got a nested tensor; wanted a dense one: call .to_padded_tensor(0).")
    if x.layout != torch.strided:
        raise UsageError(f"{op}: got a tensor of layout {x.layout}; wanted a dense one: call .to_dense().")
    if x.is_quantized:
        raise UsageError(
            f"{op}: got a quantized tensor ({x.dtype}); wanted a plain one: send .int_repr() and the scales."
        )
    if x.device != device:
        raise UsageError(f"{op}: got a tensor on {x.device}; this communicator works on {device}: move it there.")
    if x.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{op}: got a tensor that requires grad; collectives have no backward: detach it, or use torch.no_grad()."
        )
    if x.is_conj() or x.is_neg():
        raise UsageError(f"{op}: got a lazy conjugate or negative view; call .resolve_conj().resolve_neg() first.")
    if not x.is_contiguous():
        raise UsageError(
            f"{op}: got shape {tuple(x.shape)}, strides {x.stride()}; wanted a contiguous tensor: call .contiguous()."
        )
    if x.nbytes > max_bytes:
        raise UsageError(
            f"{op}: got {x.nbytes} bytes a rank; this communicator was built for at most {max_bytes}: "
            f"build it with max_bytes={x.nbytes} or more."
        )


def check_output(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], op: str) -> None:
    """Raises UsageError unless `out` can take the result: dtype and device of `x`, `shape`, and apart from `x`."""
    if not isinstance(out, torch.Tensor):
        raise UsageError(f"{op}: out is a {type(out).__name__}; wanted a torch.Tensor.")
    if out.is_nested:
        raise UsageError(f"{op}: out is a nested tensor; wanted a dense one of shape {shape}.")
    if out.dtype != x.dtype or out.device != x.device or tuple(out.shape) != shape:
        raise UsageError(
            f"{op}: out is {out.dtype} {tuple(out.shape)} on {out.device}; wanted {x.dtype} {shape} on {x.device}."
        )
    if out.layout != torch.strided or not out.is_contiguous():
        raise UsageError(f"{op}: out is not contiguous; wanted a dense contiguous tensor of shape {shape}.")
    if out.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"{op}: out requires grad; collectives have no backward: detach it.")
    if x.nbytes and out.data_ptr() < x.data_ptr() + x.nbytes and x.data_ptr() < out.data_ptr() + out.nbytes:
        raise UsageError(
            f"{op}: out overlaps the input, which is read while out is written: give it memory of its own."
        )


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raises UsageError unless `op` is a collective that adds, and `dtype` one that it adds."""
    if op not in ("all_reduce", "reduce_scatter"):
        raise UsageError(
            f"op is {op!r}; wanted 'all_reduce' or 'reduce_scatter': an all-gather is loaded from the start, and mhc() "
            "loads the sublayer boundary."
        )
    if dtype not in REDUCED_DTYPES:
        raise UsageError(f"{op}: got {dtype!r}; wanted one of {', '.join(map(str, REDUCED_DTYPES))}.")


def part_shape(x: torch.Tensor, rank: int, world_size: int) -> tuple[int, ...]:
    """Shape of a rank's part of `x` split by rows; raises UsageError where there are no rows to split."""
    if x.dim() == 0:
        raise UsageError("reduce_scatter: got a scalar; wanted rows to split: give it a first dimension.")
    return (x.shape[0] // world_size + (rank < x.shape[0] % world_size), *x.shape[1:])
