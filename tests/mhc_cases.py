# SPDX-License-Identifier: Apache-2.0
"""Inputs of a sublayer boundary, what it has to find, and the comparison: the same for CPU and GPU ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference

# Words of two bf16: those that may not travel, -0.0, subnormals, infinities, NaN.
SPECIAL_WORDS = (EMPTY, ESCAPE, 0x80008000, 0x00018001, 0x7F80FF80, 0x7FC0FFC0)
EPS = 1e-20


@dataclass
class Case:
    """One boundary of `world_size` ranks; rank r's contribution is `xs[r]`."""

    xs: list[torch.Tensor]
    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    pre: torch.Tensor | None
    norm_weight: torch.Tensor | None

    def common(self) -> tuple[object, ...]:
        """The arguments that follow a contribution."""
        return self.residual, self.post, self.comb, self.pre, self.norm_weight, EPS

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return reference.all_reduce_mhc(self.xs, *self.common())

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for a rank's results, full of something that no result is."""
        h = torch.full_like(self.xs[0], 12345.0) if self.pre is not None else None
        return torch.full_like(self.residual, 12345.0), h


@dataclass
class Experts:
    """A MoE output of every rank in expert order."""

    experts: list[torch.Tensor]
    weights: list[torch.Tensor]
    indices: list[torch.Tensor]
    shared: list[torch.Tensor | None]

    def of(self, rank: int) -> tuple[object, ...]:
        return self.experts[rank], self.weights[rank], self.indices[rank], self.shared[rank]

    def contributions(self) -> list[torch.Tensor]:
        return [reference.moe_finalize(*self.of(rank)) for rank in range(len(self.experts))]


def make_case(
    world_size: int, rows: int, hidden: int, seed: int, device: str = "cpu", *, collapse: bool = True, streams: int = 4
) -> Case:
    """Values of very different sizes, so that another order of addition, or another rounding, shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-3, 4, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * 2.0**exponents).bfloat16().to(device)

    def factors(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) * 2).to(device)

    return Case(
        [normal(rows, hidden) for _ in range(world_size)],
        normal(rows, streams, hidden),
        factors(rows, streams),
        factors(rows, streams, streams),
        factors(rows, streams) if collapse else None,
        normal(hidden) if collapse else None,
    )


def put_special_words(xs: list[torch.Tensor]) -> None:
    """Special words into even rows, never two ranks' at one place; of 4 ranks and 12 rows each word at every place.

    Odd rows stay as they are: a NaN makes the whole row's norm NaN.
    """
    for rank, x in enumerate(xs):
        words = x.view(torch.int32)
        row, place = (torch.arange(n, device=x.device) for n in words.shape)
        index = (place + row[:, None] // 2 * 4 + rank) % (4 * len(SPECIAL_WORDS))
        special = torch.tensor(SPECIAL_WORDS, device=x.device).to(torch.int32)[index // 4]
        words.copy_(torch.where((index % 4 == 0) & (row[:, None] % 2 == 0), special, words))


def make_experts(
    world_size: int, rows: int, hidden: int, top_k: int, seed: int, device: str = "cpu", *, shared: bool = True
) -> Experts:
    """Every rank holds some of the experts; rows of none, and rows of one expert taken twice, are among them."""
    generator = torch.Generator().manual_seed(seed)
    held = rows * top_k + 3

    def one(make: object) -> list[torch.Tensor]:
        return [make().to(device) for _ in range(world_size)]  # type: ignore[operator]

    experts = one(lambda: torch.randn(held, hidden, generator=generator).bfloat16())
    weights = one(lambda: torch.rand(rows, top_k, generator=generator))
    indices = one(lambda: torch.randint(-1, held, (rows, top_k), generator=generator, dtype=torch.int32))
    for rank, index in enumerate(indices):
        index[rank % rows] = -1
        weights[rank][rank % rows] = float("nan")  # of experts not held: never used
        index[-1, 0] = index[-1, -1]
    common: list[torch.Tensor | None] = list(one(lambda: torch.randn(rows, hidden, generator=generator).bfloat16()))
    return Experts(experts, weights, indices, common if shared else [None] * world_size)


def stepped(index: torch.Tensor, rank: int, step: torch.Tensor | int) -> torch.Tensor:
    """A contribution that changes with every step, in a graph too: small integers, whose sums are exact in bf16."""
    return ((index * 7 + step * 13 + rank * 29) % 64 - 32).bfloat16()


def ulps(seen: torch.Tensor, wanted: torch.Tensor) -> int:
    """The largest distance in units in the last place of bf16."""

    def ordered(values: torch.Tensor) -> torch.Tensor:
        bits = values.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    assert torch.equal(seen.isnan(), wanted.isnan())
    if not seen.numel():
        return 0
    return int(torch.where(wanted.isnan(), 0, (ordered(seen) - ordered(wanted)).abs()).max())


def check(results: list[tuple[torch.Tensor, torch.Tensor | None]], case: Case) -> None:
    """Residual streams bit for bit; h within one unit of bf16; both the same on every rank."""
    new_residual, h = case.wanted()
    for seen_residual, seen_h in results:
        same = seen_residual.view(torch.int16) == new_residual.view(torch.int16)
        same |= seen_residual.isnan() & new_residual.isnan()
        assert same.all(), f"{(~same).sum()} values differ"
        assert (seen_h is None) == (h is None)
        if h is not None and seen_h is not None:
            assert ulps(seen_h, h) <= 1
            assert torch.equal(seen_h.view(torch.int16), results[0][1].view(torch.int16))
