# SPDX-License-Identifier: Apache-2.0
"""The `virtual` world: every rank a stream of one process on one GPU, its mailbox plain device memory."""

from __future__ import annotations

from typing import Literal, Self

import torch


class VirtualMemory:
    """One virtual rank's view of all mailboxes; implements `nvcomm.memory.Memory`.

    The tensors are shared by the ranks of the world: they live until the last rank has closed.
    """

    def __init__(self, rank: int, mailboxes: list[torch.Tensor]) -> None:
        self._rank = rank
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

    @property
    def world(self) -> Literal["virtual"]:
        return "virtual"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._mailboxes)

    @property
    def size_bytes(self) -> int:
        return self._mailboxes[self._rank].numel() * 4

    @property
    def peer_ptrs(self) -> tuple[int, ...]:
        return tuple(mailbox.data_ptr() for mailbox in self._mailboxes)

    @property
    def multicast_ptr(self) -> int:
        return 0

    def local(self) -> torch.Tensor:
        """This rank's mailbox, int32."""
        return self._mailboxes[self._rank]

    def close(self) -> None:
        """Lets go of the mailboxes."""
        self._mailboxes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
