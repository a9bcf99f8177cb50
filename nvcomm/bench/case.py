# SPDX-License-Identifier: Apache-2.0
"""One size of one collective: its inputs, its right results, and how many elements of a result are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvcomm.bench.plan import DATATYPES, Op
from nvcomm.mailbox import EMPTY, ESCAPE


@dataclass(frozen=True, slots=True)
class Case:
    """A collective of `world_size` ranks at one size.

    Attributes:
        op: the collective.
        datatype: one of `DATATYPES`.
        world_size: number of ranks.
        count: elements that nccl-tests counts: what a rank sends (all_gather), gets (reduce_scatter), or both.
    """

    op: Op
    datatype: str
    world_size: int
    count: int

    @classmethod
    def of_size(cls, op: Op, datatype: str, world_size: int, size_bytes: int) -> Case:
        """The case nearest to `size_bytes`, not above it unless one element a rank is."""
        parts = 1 if op == "all_reduce" else world_size
        return cls(op, datatype, world_size, max(1, size_bytes // (_dtype(datatype).itemsize * parts)))

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.datatype)

    @property
    def size_bytes(self) -> int:
        """What nccl-tests calls size."""
        return self.count * self.dtype.itemsize * (1 if self.op == "all_reduce" else self.world_size)

    @property
    def input_count(self) -> int:
        """Elements that a rank contributes."""
        return self.count * (self.world_size if self.op == "reduce_scatter" else 1)

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md)."""
        share = (self.world_size - 1) / self.world_size
        return 2 * share if self.op == "all_reduce" else share

    def input(self, rank: int, turn: int) -> torch.Tensor:
        """Rank `rank`'s contribution in one turn of the check, on the CPU: (input_count,).

        Gathers carry any bits, and in one word of eight those that the protocol itself uses; in turn 0, which is timed,
        only as many as chance gives. Sums are of small whole numbers: exact in every dtype, in any order.
        """
        generator = torch.Generator().manual_seed(1_000_003 * turn + rank)
        if self.op != "all_gather":
            return torch.randint(-8, 9, (self.input_count,), generator=generator).to(self.dtype)
        num_bytes = self.input_count * self.dtype.itemsize
        words = torch.randint(-(2**31), 2**31, (-(-num_bytes // 4),), dtype=torch.int64, generator=generator)
        if turn:
            reserved = torch.tensor([EMPTY, ESCAPE]).repeat(-(-len(words) // 16) or 1)[: len(words[::8])]
            words[::8] = reserved - 2**32
        return words.to(torch.int32).view(torch.uint8)[:num_bytes].clone().view(self.dtype)

    def output(self, device: torch.device) -> torch.Tensor:
        """Room for the result, poisoned."""
        shape = {
            "all_gather": (self.world_size, self.count),
            "all_reduce": (self.count,),
            "reduce_scatter": (self.count,),
        }[self.op]
        return torch.full(shape, 77, dtype=self.dtype, device=device)

    def expected(self, rank: int, turn: int) -> torch.Tensor:
        """Rank `rank`'s right result, on the CPU."""
        inputs = torch.stack([self.input(each, turn) for each in range(self.world_size)])
        if self.op == "all_gather":
            return inputs
        total = inputs.double().sum(0).to(self.dtype)
        return total if self.op == "all_reduce" else total[rank * self.count : (rank + 1) * self.count].clone()

    def count_wrong(self, out: torch.Tensor, rank: int, turn: int) -> int:
        """Elements of `out` that differ from the right result in any bit; 0.0 and -0.0 are alike in a sum."""
        got, wanted = out.cpu().flatten(), self.expected(rank, turn).flatten()
        if self.op != "all_gather":
            return int((got != wanted).sum())
        size = self.dtype.itemsize
        differing = got.view(torch.uint8).view(-1, size) != wanted.view(torch.uint8).view(-1, size)
        return int(differing.any(1).sum())


def _dtype(datatype: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DATATYPES[datatype])
    return dtype
