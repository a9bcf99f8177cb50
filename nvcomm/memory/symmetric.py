# SPDX-License-Identifier: Apache-2.0
"""The `peer` world: a process per rank, its mailbox in PyTorch's symmetric memory, mapped by every other rank."""

from __future__ import annotations

import warnings
from typing import Literal, Self

import torch

from nvcomm.errors import UsageError
from nvcomm.group import StoreGroup
from nvcomm.memory.rendezvous import Rendezvous
from nvcomm.memory.torch_symmetric import Mapping, TorchSymmetricMemory


class SymmetricMemory:
    """One rank's view of all mailboxes; implements `nvcomm.memory.Memory`.

    Closing is local and waits for this rank's device, as PyTorch unmaps. A peer's mapping stays good until that peer
    closes.
    """

    world: Literal["peer"] = "peer"

    def __init__(
        self,
        group: StoreGroup,
        device: torch.device,
        size_bytes: int,
        *,
        multicast: bool,
        timeout_s: float,
        api: TorchSymmetricMemory | None = None,
    ) -> None:
        """Collective.

        Args:
            group: the ranks; each a process of its own.
            device: this rank's GPU.
            size_bytes: bytes of a mailbox, a multiple of 16, the same on every rank.
            multicast: whether to ask for a multicast object; it comes into being only if every rank asks and can,
                and no environment variable switches it off. `multicast_ptr` says whether it did.
            timeout_s: bound of each of the steps.
            api: stands in for PyTorch and the driver (tests).

        Raises:
            UsageError: an argument is wrong on this rank; the others raise GroupError.
            CapabilityError: a rank cannot take part; the same text on every rank.
            GroupError: a rank did not answer in time. If it was in the rendezvous, its process has to end.
        """
        if device.type != "cuda" or device.index is None:
            raise UsageError(f"device is {device}, wanted a GPU with its index, such as cuda:0.")
        if size_bytes <= 0 or size_bytes % 16:
            raise UsageError(f"size_bytes is {size_bytes}, wanted a positive multiple of 16.")
        self.rank, self.world_size, self.size_bytes = group.rank, group.world_size, size_bytes
        self.peer_ptrs: tuple[int, ...] = ()
        self.multicast_ptr = 0
        self._tensor: torch.Tensor | None = None
        self._mapping: Mapping | None = None
        steps = Rendezvous(group, device, size_bytes, multicast, timeout_s, api or TorchSymmetricMemory())
        self._tensor, self._mapping, use_multicast = steps.build()
        self.peer_ptrs = tuple(int(ptr) for ptr in self._mapping.buffer_ptrs)
        self.multicast_ptr = int(self._mapping.multicast_ptr) if use_multicast else 0

    def local(self) -> torch.Tensor:
        """This rank's mailbox, int32. Raises UsageError once closed."""
        if self._tensor is None:
            raise UsageError("this memory is closed: build a new communicator.")
        return self._tensor.view(torch.int32)

    def close(self) -> None:
        """Unmaps; waits for this rank's device. Harmless when called twice."""
        self.peer_ptrs, self.multicast_ptr = (), 0
        # The mapping first: it refers to the allocation, and a multicast object goes before what is bound to it.
        self._mapping = None
        self._tensor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn("a SymmetricMemory was not closed", ResourceWarning, stacklevel=2)
