# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands to the sublayer boundary, and its default outputs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch

from nvcomm.errors import UsageError

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce_mhc_config import MhcShape
    from nvcomm.communicator import Communicator

_ALIGNMENT = 16
_MOST_EPS = torch.finfo(torch.float32).max  # it is added in FP32


@dataclass(frozen=True, slots=True)
class BoundaryArguments:
    """What a caller gives for one sublayer boundary; see `AllReduceMhc.__call__`. `pre` None: no collapse."""

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    pre: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    new_residual: torch.Tensor | None
    h: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BoundaryTensors(BoundaryArguments):
    """The same, checked, its outputs there."""

    new_residual: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Checked tensors of a MoE output in expert order; see `AllReduceMhc.finalize`."""

    experts: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    shared: torch.Tensor | None


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises UsageError unless `tensor` has this shape, dtype and device, and a kernel can read it 16 bytes at once."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"all_reduce_mhc: {name} is a {type(tensor).__name__}; wanted a torch.Tensor.")
    if tensor.is_nested or tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        seen = "nested" if tensor.is_nested else str(tuple(tensor.shape))
        raise UsageError(
            f"all_reduce_mhc: {name} is {tensor.dtype} {seen} on {tensor.device}; wanted {dtype} {shape} on {device}."
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        raise UsageError(
            f"all_reduce_mhc: {name} is not contiguous or not 16-byte aligned: call .contiguous().clone()."
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"all_reduce_mhc: {name} requires grad; collectives have no backward: detach it.")


def sizes_of(residual: torch.Tensor) -> tuple[int, int]:
    """(hidden, num_streams) of residual streams (rows, streams, hidden); raises UsageError for anything else."""
    if not isinstance(residual, torch.Tensor):
        seen = f"a {type(residual).__name__}"
    elif residual.is_nested:
        seen = "nested"
    elif residual.dim() != 3:
        seen = str(tuple(residual.shape))
    else:
        return residual.shape[2], residual.shape[1]
    raise UsageError(f"all_reduce_mhc: residual is {seen}; wanted a tensor (rows, streams, hidden).")


def check_rows(rows: int, shape: MhcShape, comm: Communicator) -> None:
    """Raises UsageError if so many rows do not fit the mailbox."""
    if rows * shape.row_bytes > comm.max_bytes:
        raise UsageError(
            f"all_reduce_mhc: got {rows} rows of {shape.row_bytes} bytes; this communicator was built for at most "
            f"{comm.max_bytes}: build it with max_bytes={rows * shape.row_bytes} or more."
        )


def check_contribution(x: torch.Tensor, shape: MhcShape, comm: Communicator) -> None:
    """Raises UsageError unless `x` can be contributed."""
    rows = _rows(x)
    check_tensor("x", x, (rows, shape.hidden), torch.bfloat16, comm.device)
    check_rows(rows, shape, comm)


def check_experts(
    shape: MhcShape,
    comm: Communicator,
    experts: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    shared: torch.Tensor | None,
) -> ExpertTensors:
    """The arguments of `finalize`, checked; raises UsageError."""
    if shape.top_k == 0:
        raise UsageError("finalize: this operation was built without experts: give mhc() a top_k.")
    rows, num_experts = _rows(indices), _rows(experts)
    check_tensor("experts", experts, (num_experts, shape.hidden), torch.bfloat16, comm.device)
    check_tensor("expert_indices", indices, (rows, shape.top_k), torch.int32, comm.device)
    check_tensor("expert_weights", weights, (rows, shape.top_k), torch.float32, comm.device)
    if comm.device.type == "cpu" and rows and not -1 <= int(indices.min()) <= int(indices.max()) < num_experts:
        raise UsageError(
            f"all_reduce_mhc: expert_indices are {int(indices.min())} to {int(indices.max())}; wanted rows of experts, "
            f"0 to {num_experts - 1}, or -1."
        )
    if shared is not None:
        check_tensor("shared", shared, (rows, shape.hidden), torch.bfloat16, comm.device)
    check_rows(rows, shape, comm)
    return ExpertTensors(experts, weights, indices, shared)


def check_boundary(
    shape: MhcShape, comm: Communicator, rows: int, given: BoundaryArguments, *sources: torch.Tensor | None
) -> BoundaryTensors:
    """The arguments of a boundary, checked, with new tensors for the outputs that are None; raises UsageError.

    Args:
        shape: of the boundary.
        comm: it is called on.
        rows: of its contribution.
        given: all arguments that the ways of calling it have in common.
        sources: what else is read: no output lies over it.
    """
    tensors = _check_tensors(shape, comm.device, rows, given)
    _check_apart(tensors, sources)
    return tensors


def _check_tensors(shape: MhcShape, device: torch.device, rows: int, given: BoundaryArguments) -> BoundaryTensors:
    pre, norm_weight, eps, h = given.pre, given.norm_weight, given.eps, given.h
    if not isinstance(eps, Real) or isinstance(eps, bool) or not 0 <= eps <= _MOST_EPS:
        raise UsageError(f"all_reduce_mhc: eps is {eps!r}; wanted a number of the host from 0 to {_MOST_EPS:.1e}.")
    streams = (rows, shape.num_streams, shape.hidden)
    check_tensor("residual", given.residual, streams, torch.bfloat16, device)
    check_tensor("post", given.post, streams[:2], torch.float32, device)
    check_tensor("comb", given.comb, (*streams[:2], shape.num_streams), torch.float32, device)
    if (pre is None) != (norm_weight is None):
        raise UsageError("all_reduce_mhc: pre and norm_weight go together: give both, or neither.")
    new_residual = torch.empty_like(given.residual) if given.new_residual is None else given.new_residual
    check_tensor("new_residual", new_residual, streams, torch.bfloat16, device)
    if pre is not None and norm_weight is not None:
        check_tensor("pre", pre, streams[:2], torch.float32, device)
        check_tensor("norm_weight", norm_weight, (shape.hidden,), torch.bfloat16, device)
        h = given.residual.new_empty(rows, shape.hidden) if h is None else h
        check_tensor("h", h, (rows, shape.hidden), torch.bfloat16, device)
    elif h is not None:
        raise UsageError("all_reduce_mhc: there is no h without pre: give h=None.")
    return BoundaryTensors(given.residual, given.post, given.comb, pre, norm_weight, float(eps), new_residual, h)


def _check_apart(tensors: BoundaryTensors, sources: tuple[torch.Tensor | None, ...]) -> None:
    """Raises UsageError if an output lies over an input, except for the new residual in place of the old one.

    A row is written while other rows are still read.
    """
    read = [tensors.post, tensors.comb, tensors.pre, tensors.norm_weight, *sources]
    if tensors.new_residual.data_ptr() != tensors.residual.data_ptr():
        read.append(tensors.residual)
    taken = [_span(one) for one in read if one is not None]
    for name, out in (("new_residual", tensors.new_residual), ("h", tensors.h)):
        if out is None:
            continue
        start, stop = _span(out)
        if any(start < end and begin < stop for begin, end in taken):
            raise UsageError(
                f"all_reduce_mhc: {name} lies over another tensor of this call: give it memory of its own"
                f"{', or all of residual' if name == 'new_residual' else ''}."
            )
        taken.append((start, stop))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _rows(tensor: object) -> int:
    """Rows of what may be no tensor, which `check_tensor` will say."""
    return len(tensor) if isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.dim() else 0
