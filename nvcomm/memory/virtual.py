# SPDX-License-Identifier: Apache-2.0
"""The `virtual` world: every rank a stream of one process on one GPU, its mailbox plain device memory."""

from __future__ import annotations

from typing import Literal, Self

import torch


class VirtualMemory:
    """One virtual rank's view of all mailboxes; implements `nvcomm.memory.Memory`.

    The tensors are shared by the ranks of the world: they live until the last rank has closed.
    """

    world: Literal["virtual"] = "virtual"
    multicast_ptr = 0

    def __init__(self, rank: int, mailboxes: list[torch.Tensor]) -> None:
        self.rank = rank
        self.world_size = len(mailboxes)
        self.size_bytes = mailboxes[rank].nbytes
        self.peer_ptrs = tuple(mailbox.data_ptr() for mailbox in mailboxes)
        self._mailboxes = mailboxes

    @classmethod
    def build(cls, world_size: int, size_bytes: int, device: torch.device) -> list[VirtualMemory]:
        """One memory per rank.

        Args:
            world_size: number of ranks.
            size_bytes: bytes of a mailbox, a multiple of 16.
            device: the GPU they share.
        """
        mailboxes = [torch.empty(size_bytes // 4, dtype=torch.int32, device=device) for _ in range(world_size)]
        return [cls(rank, mailboxes) for rank in range(world_size)]

    def local(self) -> torch.Tensor:
        """This rank's mailbox, int32."""
        return self._mailboxes[self.rank]

    def close(self) -> None:
        """Lets go of the mailboxes."""
        self.peer_ptrs = ()
        self._mailboxes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
