# SPDX-License-Identifier: Apache-2.0
"""Whom we are measured against, in the same processes: torch.distributed, PyTorch's symmetric memory, and ourselves.

torch.distributed is gloo on CPUs and NCCL on GPUs. Ourselves: the all-reduce held to one of its protocols.
Where the boundary is measured, each one's all-reduce with the rest behind it.
"""

from __future__ import annotations

import atexit
import functools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvcomm.bench.contender import Contender
from nvcomm.bench.plan import Op, Plan
from nvcomm.communicator import Communicator
from nvcomm.errors import UnsupportedError
from nvcomm.group import StoreGroup


def contenders(plan: Plan, group: StoreGroup, comm: Communicator, most_bytes: int) -> list[Contender]:
    """All that `plan.against` names. Collective.

    Args:
        plan: what is measured.
        group: the ranks.
        comm: our communicator.
        most_bytes: most that a rank contributes to a call.

    Raises:
        UnsupportedError: NCCL has too few GPUs here.
    """
    plan = replace(plan, against=named(plan, group.world_size, comm.device))
    found: list[Contender] = []
    if {"torch", "nccl", "symm_mem"} & set(plan.against) or plan.vllm_library:
        backend = _backend(plan, group.world_size, comm.device)
        store, limit = group.child_store("nvcomm.bench.torch"), timedelta(seconds=plan.timeout_s)
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world_size, timeout=limit)
        atexit.register(dist.destroy_process_group)
        if {"torch", "nccl"} & set(plan.against):
            found.append(_torch_contender(plan.op, f"torch/{backend}"))
    if "symm_mem" in plan.against:
        from nvcomm.bench.symmetric_memory import symmetric_contenders

        found += symmetric_contenders(plan, group, comm.device, most_bytes)
    if plan.vllm_library is not None:
        from nvcomm.bench.vllm_kernels import vllm_contender

        found.append(vllm_contender(plan, group, comm.device, most_bytes))
    for protocol in ("ll", "two_shot"):
        if protocol in plan.against:
            held: Any = functools.partial(comm.all_reduce, protocol=protocol)
            found.append(Contender(f"nvcomm/{protocol}", held, held))
    if plan.op == "all_reduce_mhc":
        from nvcomm.bench.boundary import unfused

        return [unfused(each) for each in found]
    return found


def named(plan: Plan, world_size: int, device: torch.device) -> tuple[str, ...]:
    """`plan.against` with "installed" as the names that it stands for on this machine."""
    if "installed" not in plan.against:
        return plan.against
    if device.type == "cpu":
        peers = ["torch"]
    else:
        peers = ["nccl"] if dist.is_nccl_available() and torch.cuda.device_count() >= world_size else []
        peers += [] if plan.op == "reduce_scatter" else ["symm_mem"]
    return tuple(dict.fromkeys([*peers, *(name for name in plan.against if name != "installed")]))


def _backend(plan: Plan, world_size: int, device: torch.device) -> str:
    if device.type == "cpu" or not {"torch", "nccl"} & set(plan.against):
        return "gloo"
    if torch.cuda.device_count() < world_size:
        raise UnsupportedError(
            f"--against {','.join(plan.against)}: NCCL wants a GPU for each rank; this host has "
            f"{torch.cuda.device_count()} for {world_size} ranks."
        )
    return "nccl"


def _torch_contender(op: Op, name: str) -> Contender:
    # Newer versions of torch have other names for both, and warn of these.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    if op in ("all_reduce", "all_reduce_mhc"):

        def out_of_place(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x)
            dist.all_reduce(out)

        return Contender(name, out_of_place, lambda x, out: dist.all_reduce(out), leaves_result=False)
    call = _flat(gather if op == "all_gather" else scatter)
    return Contender(name, call, call)


def _flat(call: Any) -> Any:
    return lambda x, out: call(out.view(-1), x)
