# SPDX-License-Identifier: Apache-2.0
"""Calls of any kind, drawn at random: their inputs, what a rank does, and what has to come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from nvcomm.communicator import Communicator
from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference

GATHERED = (torch.uint8, torch.int32, torch.bfloat16, torch.float64)
SUMMED = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        op: "gather", "ll", "two_shot" or "scatter".
        dtype: of the elements.
        shape: of each rank's input.
        seed: of the values.
    """

    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int

    def inputs(self, world_size: int, device: torch.device) -> list[torch.Tensor]:
        """Rank r's at index r: any bits for a gather, one word in four reserved; numbers of many sizes for sums."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._values(generator).to(device) for _ in range(world_size)]

    def _values(self, generator: torch.Generator) -> torch.Tensor:
        if self.op != "gather":
            exponent = torch.randint(-6, 7, self.shape, generator=generator)
            return (torch.randn(self.shape, generator=generator) * 2.0**exponent).to(self.dtype)
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        words = torch.randint(-(2**31), 2**31, (-(-count // 4),), generator=generator)
        kind = torch.randint(0, 8, words.shape, generator=generator)
        words = torch.where(kind == 0, EMPTY - 2**32, torch.where(kind == 1, ESCAPE - 2**32, words)).to(torch.int32)
        return words.view(torch.uint8)[:count].clone().view(self.dtype).reshape(self.shape)

    def wanted(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What rank r has to find, at index r."""
        if self.op == "gather":
            return [reference.all_gather(xs)] * len(xs)
        if self.op == "scatter":
            return reference.reduce_scatter(xs)
        return [reference.all_reduce(xs)] * len(xs)

    def run(self, comm: Communicator, x: torch.Tensor, out: torch.Tensor) -> None:
        """One rank's part."""
        if self.op == "gather":
            comm.all_gather(x, out)
        elif self.op == "scatter":
            comm.reduce_scatter(x, out)
        else:
            comm.all_reduce(x, out, protocol=self.op)

    def again(self, seed: int) -> Call:
        """The same call with other values."""
        return replace(self, seed=seed)

    @property
    def moves(self) -> bool:
        """Whether it takes a generation: a call in which nobody sends does not (R12)."""
        return torch.Size(self.shape).numel() > 0


def same_bits(seen: torch.Tensor, wanted: torch.Tensor, *, sums: bool) -> bool:
    """Equal bit by bit; a NaN of a sum may have other bits."""
    if sums:
        nan = wanted.isnan()
        return torch.equal(seen.isnan(), nan) and torch.equal(seen[~nan], wanted[~nan])
    return torch.equal(seen.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def calls(most: int, gathered: Sequence[torch.dtype] = GATHERED, summed: Sequence[torch.dtype] = SUMMED):
    """A strategy: one call of up to `most` elements a rank, of no element now and then."""
    seeds = st.integers(0, 2**32 - 1)
    sizes = st.one_of(st.integers(0, 40), st.integers(0, most), st.sampled_from([4, 16, 64, 128, 512]))
    gathers = st.builds(Call, st.just("gather"), st.sampled_from(gathered), st.tuples(sizes), seeds)
    rows = st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 8, 64]))
    sums = st.builds(Call, st.sampled_from(["ll", "two_shot"]), st.sampled_from(summed), st.tuples(sizes), seeds)
    scatters = st.builds(Call, st.just("scatter"), st.sampled_from(summed), rows, seeds)
    return st.one_of(gathers, sums, scatters)
