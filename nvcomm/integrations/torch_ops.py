# SPDX-License-Identifier: Apache-2.0
"""The collectives as torch operators, so that `torch.compile` traces them: `torch.ops.nvcomm.all_gather` and others.

An operator takes tensors, numbers and texts only, so a communicator gets a name and its ranks call by that:

    ops = torch_ops.register(comm)          # every rank, once
    step = torch.compile(lambda x: ops.all_reduce(x).relu(), fullgraph=True)

The operators are functional: each returns a new tensor. To a compiler that makes them look removable where the result
is unused, mergeable where two are alike, and free to move. A collective is none of it, as its peers wait for it: so
each is registered with an effect, which keeps every call, in the order of the program. PyTorch honours effects on
functional operators only; the `out=` forms of `Communicator` are for eager code and for CUDA graphs.

Rank and number of ranks are arguments, not looked up: a compiled graph may come from a cache on disk, where the name of
a communicator says nothing about its size.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from nvcomm.communicator import Communicator
from nvcomm.errors import UsageError

# Operators can be given a name only, so this has to be global. Weak: who built a communicator closes it.
_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


@dataclass(frozen=True)
class TorchOps:
    """The operators on one communicator; use it inside or outside of compiled code. Built by `register`.

    Attributes:
        name: of the communicator.
        rank: this rank.
        world_size: number of ranks.

    Inputs may have any layout: one that is not contiguous is copied. No operator has a derivative.
    """

    name: str
    rank: int
    world_size: int

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(world_size, *x.shape): every rank's `x`; see `Communicator.all_gather`."""
        return torch.ops.nvcomm.all_gather(x, self.name, self.world_size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`; see `Communicator.all_reduce`."""
        return torch.ops.nvcomm.all_reduce(x, self.name)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of every rank's `x`; see `Communicator.reduce_scatter`."""
        return torch.ops.nvcomm.reduce_scatter(x, self.name, self.rank, self.world_size)

    def all_reduce_mhc(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New residual streams and the next sublayer's input, or None; see `Communicator.all_reduce_mhc`."""
        args = (x, residual, post, comb, pre, norm_weight, eps, self.name)
        new_residual, h = torch.ops.nvcomm.all_reduce_mhc(*args)
        return new_residual, None if pre is None else h


def register(comm: Communicator, name: str | None = None) -> TorchOps:
    """Gives `comm` a name that the operators find it by, for as long as it lives.

    Args:
        comm: a communicator. The caller keeps it, and closes it.
        name: default: a new one. Give one that says what the group is for where compiled graphs are cached on disk:
            it is part of the graph.

    Raises:
        UsageError: another communicator that is still open has this name; or there is none to register.
    """
    if not isinstance(comm, Communicator):
        raise UsageError(f"comm is a {type(comm).__name__}; wanted an nvcomm.Communicator.")
    if name is not None and (not isinstance(name, str) or not name):
        raise UsageError(f"name is {name!r}; wanted a text, or None for a new name.")
    with _lock:
        name = f"nvcomm_{next(_numbers)}" if name is None else name
        known = _communicators.get(name)
        if known is not None and known is not comm and _is_open(known):
            raise UsageError(f"another communicator is registered as {name!r}: close it, or choose another name.")
        _communicators[name] = comm
    return TorchOps(name, comm.rank, comm.world_size)


def _is_open(comm: Communicator) -> bool:
    try:
        return comm.engine is not None
    except UsageError:
        return False


def _found(name: str, op: str, rank: int | None = None, world_size: int | None = None) -> Communicator:
    comm = _communicators.get(name)
    if comm is None:
        raise UsageError(
            f"nvcomm::{op}: no communicator is registered as {name!r}: call torch_ops.register, and "
            "keep the communicator for as long as graphs use it."
        )
    if rank not in (None, comm.rank) or world_size not in (None, comm.world_size):
        raise UsageError(
            f"nvcomm::{op}: traced for rank {rank} of {world_size}, and {name!r} is rank {comm.rank} of "
            f"{comm.world_size}: compile again, or register the communicator that this graph was made for."
        )
    return comm


@torch.library.custom_op("nvcomm::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, name: str, world_size: int) -> torch.Tensor:
    return _found(name, "all_gather", world_size=world_size).all_gather(x.contiguous())


@torch.library.custom_op("nvcomm::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, name: str) -> torch.Tensor:
    return _found(name, "all_reduce").all_reduce(x.contiguous())


@torch.library.custom_op("nvcomm::reduce_scatter", mutates_args=())
def _reduce_scatter(x: torch.Tensor, name: str, rank: int, world_size: int) -> torch.Tensor:
    return _found(name, "reduce_scatter", rank, world_size).reduce_scatter(x.contiguous())


@torch.library.custom_op("nvcomm::all_reduce_mhc", mutates_args=())
def _all_reduce_mhc(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual, h = _found(name, "all_reduce_mhc").all_reduce_mhc(
        x.contiguous(),
        residual.contiguous(),
        post.contiguous(),
        comb.contiguous(),
        None if pre is None else pre.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
        eps,
    )
    # An operator cannot return None: without a collapse the second result has no rows.
    return new_residual, x.new_empty((0, x.shape[1])) if h is None else h


@_all_gather.register_fake
def _all_gather_fake(x: torch.Tensor, name: str, world_size: int) -> torch.Tensor:
    return x.new_empty((world_size, *x.shape))


@_all_reduce.register_fake
def _all_reduce_fake(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@_reduce_scatter.register_fake
def _reduce_scatter_fake(x: torch.Tensor, name: str, rank: int, world_size: int) -> torch.Tensor:
    if x.dim() == 0:
        raise UsageError("reduce_scatter: got a scalar; wanted rows to split: give it a first dimension.")
    # What `part_shape` says, without a comparison: the number of rows may be a symbol.
    return x.new_empty(((x.shape[0] + world_size - 1 - rank) // world_size, *x.shape[1:]))


@_all_reduce_mhc.register_fake
def _all_reduce_mhc_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return residual.new_empty(residual.shape), x.new_empty((0, x.shape[1]) if pre is None else x.shape)


def _no_derivative(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise UsageError(
        "an operator of nvcomm has no derivative, and one was asked for: run or compile the step under "
        "torch.no_grad() or torch.inference_mode(), or detach what goes in."
    )


for _op in (_all_gather, _all_reduce, _reduce_scatter, _all_reduce_mhc):
    # Without it torch asks to have a derivative registered, which is not for who uses an operator to do.
    _op.register_autograd(_no_derivative)
for _name in ("all_gather", "all_reduce", "reduce_scatter", "all_reduce_mhc"):
    _register_effectful_op(getattr(torch.ops.nvcomm, _name).default, _EffectType.ORDERED)
