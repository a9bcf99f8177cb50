# SPDX-License-Identifier: Apache-2.0
"""The calls into PyTorch's symmetric memory and the driver, one method each.

The only user of `torch.distributed._symmetric_memory`, which PyTorch calls alpha. It does the driver's work: physical
memory, handles over Unix sockets or the fabric of an NVLink domain, mappings and, where wanted, a multicast object.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nvcomm import topology
from nvcomm.group import StoreGroup


class Mapping(Protocol):
    """What a rendezvous returns, as far as it is used here."""

    @property
    def buffer_ptrs(self) -> list[int]: ...

    @property
    def multicast_ptr(self) -> int: ...


class TorchSymmetricMemory:
    """The calls into PyTorch and the driver, one method each, so that tests can make every one of them fail."""

    def device_uuid(self, device: torch.device) -> str:
        """The UUID of `device`, or an error that says why its memory cannot be shared."""
        facts = topology.device(device.index)
        if not facts.virtual_memory:
            raise RuntimeError(f"{device} has no virtual memory management, which mapping a peer's memory needs")
        backend = torch._C._distributed_c10d._SymmetricMemory.get_backend(device)
        if backend != "CUDA":
            raise RuntimeError(
                f"PyTorch's symmetric memory uses the backend {backend}, wanted CUDA: unset TORCH_SYMMMEM"
            )
        return facts.uuid

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that peers can map, uint8: its own allocation, as peers get pointers to the beginning of one."""
        return torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)

    def rendezvous(self, tensor: torch.Tensor, group: StoreGroup, name: str) -> Mapping:
        """Maps every rank's tensor. Collective; returns when all ranks have got that far, which may be never."""
        c10d: Any = torch._C._distributed_c10d
        # PyTorch looks ranks and store up under the name of a process group, and takes no more from it than these.
        process_group = c10d.ProcessGroup(group.child_store(name), group.rank, group.world_size)
        c10d._register_process_group(name, process_group)  # which does not keep it alive
        try:
            with torch.cuda.device(tensor.device):
                mapping: Mapping = c10d._SymmetricMemory.rendezvous(tensor, name)
                return mapping
        finally:
            c10d._unregister_process_group(name)
            del process_group
