# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory as a contender: what it has that needs no multicast object.

Its collectives read their input from symmetric memory. Inputs are put there before the timing, which leaves out a copy
that a caller with ordinary tensors pays for.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from nvcomm import topology
from nvcomm.bench.contender import Contender
from nvcomm.bench.plan import DATATYPES, Plan
from nvcomm.group import StoreGroup


def symmetric_contenders(plan: Plan, group: StoreGroup, device: torch.device, most_bytes: int) -> list[Contender]:
    """One-shot and two-shot all-reduce, or the all-gather by copies; nothing for a reduce-scatter. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    # No multicast object, whoever runs this: none of these calls would use it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    uuids = group.exchange("nvcomm.bench.uuid", topology.device(device.index).uuid, plan.timeout_s)
    if len(set(map(str, uuids))) < len(uuids):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dtype: torch.dtype = getattr(torch, DATATYPES[plan.datatype])
    buffer = symm_mem.empty(most_bytes // dtype.itemsize, dtype=dtype, device=device)
    world = dist.group.WORLD
    assert world is not None
    symm_mem.rendezvous(buffer, world)
    name, ops = world.group_name, torch.ops.symm_mem

    def load(x: torch.Tensor) -> None:
        """Puts the input where it is read; no rank does so while another still reads the last one."""
        torch.cuda.synchronize()
        group.barrier("nvcomm.bench.read", plan.timeout_s)
        buffer[: x.numel()].copy_(x)
        torch.cuda.synchronize()
        group.barrier("nvcomm.bench.loaded", plan.timeout_s)

    def loaded(call: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[torch.Tensor, torch.Tensor], object]:
        def load_and_call(x: torch.Tensor, out: torch.Tensor) -> None:
            load(x)
            call(x, out)

        return load_and_call

    def one_shot(x: torch.Tensor, out: torch.Tensor) -> None:
        ops.one_shot_all_reduce_out(buffer[: x.numel()], "sum", name, out)

    def two_shot(x: torch.Tensor, out: torch.Tensor) -> None:
        ops.two_shot_all_reduce_(buffer[: x.numel()], "sum", name)

    def two_shot_checked(x: torch.Tensor, out: torch.Tensor) -> None:
        two_shot(x, out)
        out.copy_(buffer[: x.numel()])

    def gather(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops._low_contention_all_gather(buffer[: x.numel()], name)
        return torch.ops._c10d_functional.wait_tensor(found)  # type: ignore[no-any-return]

    def gather_checked(x: torch.Tensor, out: torch.Tensor) -> None:
        out.view(-1).copy_(gather(x, out))

    if plan.op == "all_gather":
        return [Contender("symm_mem/copies", loaded(gather_checked), gather, load, leaves_result=False)]
    if plan.op in ("all_reduce", "all_reduce_mhc"):
        return [
            Contender("symm_mem/1shot", loaded(one_shot), one_shot, load),
            Contender("symm_mem/2shot", loaded(two_shot_checked), two_shot, load, leaves_result=False),
        ]
    return []
