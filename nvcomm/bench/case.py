# SPDX-License-Identifier: Apache-2.0
"""One size of one collective: its inputs, its right results, and how many elements of a result are wrong."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from nvcomm.bench.plan import DATATYPES, Op
from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference

# The boundary of a sublayer: a row is a token's hidden state.
HIDDEN, STREAMS, EPS = 5120, 4, 1e-20


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
        parts = 1 if op in ("all_reduce", "all_reduce_mhc") else world_size
        granule = HIDDEN if op == "all_reduce_mhc" else 1
        count = max(1, size_bytes // (_dtype(datatype).itemsize * parts * granule)) * granule
        return cls(op, datatype, world_size, count)

    def third(self) -> Case:
        """The same at about a third of the size, in whole rows of a boundary and whole 16 bytes where this has them."""
        granule = HIDDEN if self.op == "all_reduce_mhc" else max(1, 16 // self.dtype.itemsize)
        if self.count % granule:
            granule = 1
        return replace(self, count=max(1, self.count // (3 * granule)) * granule)

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.datatype)

    @property
    def size_bytes(self) -> int:
        """What nccl-tests calls size."""
        return self.count * self.dtype.itemsize * (1 if self._is_all_reduce else self.world_size)

    @property
    def input_count(self) -> int:
        """Elements that a rank contributes."""
        return self.count * (self.world_size if self.op == "reduce_scatter" else 1)

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md)."""
        share = (self.world_size - 1) / self.world_size
        return 2 * share if self._is_all_reduce else share

    @property
    def _is_all_reduce(self) -> bool:
        return self.op in ("all_reduce", "all_reduce_mhc")

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
            "all_reduce_mhc": (self.count * (STREAMS + 1),),
        }[self.op]
        return torch.full(shape, 77, dtype=self.dtype, device=device)

    def expected(self, rank: int, turn: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Rank `rank`'s right result, computed on `device`."""
        inputs = torch.stack([self.input(each, turn) for each in range(self.world_size)]).to(device)
        if self.op == "all_gather":
            return inputs
        total = inputs.double().sum(0).to(self.dtype)
        if self.op == "all_reduce_mhc":
            rows = self.count // HIDDEN
            residual, post, comb, pre, weight = mixes(rows, torch.device(device))
            parts = reference.mhc_boundary(total.view(rows, HIDDEN), residual, post, comb, pre, weight, EPS)
            return torch.cat([part.flatten() for part in parts if part is not None])
        return total if self.op == "all_reduce" else total[rank * self.count : (rank + 1) * self.count].clone()

    def count_wrong(self, out: torch.Tensor, rank: int, turn: int) -> int:
        """Elements of `out` that differ from the right result.

        In any bit for a gather; 0.0 and -0.0 are alike in a sum. A boundary's may be off by 3 % of what elements are
        like at that place, for a compiler that fuses rounds less often than we do, and sums cancel: that ours has the
        reference's bits is for the tests to show.
        """
        if self.op == "all_reduce_mhc":
            got, wanted = out.flatten().float(), self.expected(rank, turn, out.device).float()
            split = self.count * STREAMS
            return sum(_far(got[part], wanted[part]) for part in (slice(split), slice(split, None)))
        got, wanted = out.cpu().flatten(), self.expected(rank, turn).flatten()
        if self.op != "all_gather":
            return int((got != wanted).sum())
        size = self.dtype.itemsize
        differing = got.view(torch.uint8).view(-1, size) != wanted.view(torch.uint8).view(-1, size)
        return int(differing.any(1).sum())


def _far(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Elements that differ by more than 1/32 of the larger of them and the root mean square."""
    usual = wanted.square().mean().sqrt()
    return int((~((got - wanted).abs() <= torch.maximum(wanted.abs(), usual) / 32)).sum())


@functools.lru_cache(maxsize=4)
def mixes(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a boundary takes beside a contribution, but for eps, the same on every rank.

    Returns:
        residual (rows, STREAMS, HIDDEN) bf16, post (rows, STREAMS), comb (rows, STREAMS, STREAMS) and pre
        (rows, STREAMS) fp32, norm_weight (HIDDEN,) bf16, on `device`.
    """
    generator = torch.Generator().manual_seed(rows)

    def factors(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(device)

    residual, weight = (
        torch.randn(shape, generator=generator).bfloat16().to(device) for shape in ((rows, STREAMS, HIDDEN), (HIDDEN,))
    )
    return residual, factors(rows, STREAMS), factors(rows, STREAMS, STREAMS), factors(rows, STREAMS), weight


def _dtype(datatype: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DATATYPES[datatype])
    return dtype
