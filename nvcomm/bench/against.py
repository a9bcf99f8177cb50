# SPDX-License-Identifier: Apache-2.0
"""Whom we are measured against, in the same processes: torch.distributed, with gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvcomm.bench.plan import Plan
from nvcomm.bench.rank import Contender
from nvcomm.errors import UnsupportedError
from nvcomm.group import StoreGroup


def torch_contender(plan: Plan, group: StoreGroup, device: torch.device) -> Contender:
    """Builds torch's process group on the ranks of `group`. Collective.

    Raises:
        UnsupportedError: NCCL has too few GPUs here.
    """
    backend = "gloo" if device.type == "cpu" else "nccl"
    if backend == "nccl" and torch.cuda.device_count() < group.world_size:
        raise UnsupportedError(
            f"--against {plan.against}: NCCL wants a GPU for each rank; this host has {torch.cuda.device_count()} for "
            f"{group.world_size} ranks."
        )
    store, limit = group.child_store("nvcomm.bench.torch"), timedelta(seconds=plan.timeout_s)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world_size, timeout=limit)
    atexit.register(dist.destroy_process_group)
    # Newer versions of torch have other names for both, and warn of these.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    name = f"torch/{backend}"
    if plan.op == "all_reduce":

        def out_of_place(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x)
            dist.all_reduce(out)

        return Contender(name, out_of_place, lambda x, out: dist.all_reduce(out))
    if plan.op == "all_gather":
        gathering = _flat(gather)
        return Contender(name, gathering, gathering)
    scattering = _flat(scatter)
    return Contender(name, scattering, scattering)


def _flat(call: Any) -> Any:
    return lambda x, out: call(out.view(-1), x)
