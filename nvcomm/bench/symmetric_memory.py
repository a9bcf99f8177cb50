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

Call = Callable[[torch.Tensor, torch.Tensor], object]


class SharedInput:
    """A tensor that all ranks can read, for contenders that read each other's inputs. Collective.

    Attributes:
        buffer: this rank's.
        pointers: every rank's, as this process sees them.
        group_name: torch's name of the ranks.
    """

    def __init__(self, plan: Plan, group: StoreGroup, device: torch.device, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        # No multicast object, whoever runs this: nothing here would use it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        uuids = group.exchange("nvcomm.bench.uuid", topology.device(device.index).uuid, plan.timeout_s)
        if len(set(map(str, uuids))) < len(uuids):
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dtype: torch.dtype = getattr(torch, DATATYPES[plan.datatype])
        self.buffer = symm_mem.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        world = dist.group.WORLD
        assert world is not None
        self.group_name = world.group_name
        self._mapping = symm_mem.rendezvous(self.buffer, world)
        self.pointers = [int(pointer) for pointer in self._mapping.buffer_ptrs]
        self._group, self._timeout_s = group, plan.timeout_s

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The part of the buffer that holds a contribution like `x`."""
        return self.buffer[: x.numel()]

    def load(self, x: torch.Tensor) -> None:
        """Puts the input where it is read; no rank does so while another still reads the last one. Collective."""
        torch.cuda.synchronize()
        self._group.barrier("nvcomm.bench.read", self._timeout_s)
        self.of(x).copy_(x)
        torch.cuda.synchronize()
        self._group.barrier("nvcomm.bench.loaded", self._timeout_s)

    def loaded(self, call: Call) -> Call:
        """`call` with its input put there first."""

        def load_and_call(x: torch.Tensor, out: torch.Tensor) -> None:
            self.load(x)
            call(x, out)

        return load_and_call


def symmetric_contenders(plan: Plan, group: StoreGroup, device: torch.device, most_bytes: int) -> list[Contender]:
    """One-shot and two-shot all-reduce, or the all-gather by copies; nothing for a reduce-scatter. Collective."""
    shared = SharedInput(plan, group, device, most_bytes)
    name, ops = shared.group_name, torch.ops.symm_mem

    def one_shot(x: torch.Tensor, out: torch.Tensor) -> None:
        ops.one_shot_all_reduce_out(shared.of(x), "sum", name, out)

    def two_shot(x: torch.Tensor, out: torch.Tensor) -> None:
        ops.two_shot_all_reduce_(shared.of(x), "sum", name)

    def two_shot_checked(x: torch.Tensor, out: torch.Tensor) -> None:
        two_shot(x, out)
        out.copy_(shared.of(x))

    def gather(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops._low_contention_all_gather(shared.of(x), name)
        return torch.ops._c10d_functional.wait_tensor(found)  # type: ignore[no-any-return]

    def gather_checked(x: torch.Tensor, out: torch.Tensor) -> None:
        out.view(-1).copy_(gather(x, out))

    if plan.op == "all_gather":
        checked = shared.loaded(gather_checked)
        return [Contender("symm_mem/copies", checked, gather, shared.load, leaves_result=False)]
    if plan.op in ("all_reduce", "all_reduce_mhc"):
        return [
            Contender("symm_mem/1shot", shared.loaded(one_shot), one_shot, shared.load),
            Contender("symm_mem/2shot", shared.loaded(two_shot_checked), two_shot, shared.load, leaves_result=False),
        ]
    return []
