# SPDX-License-Identifier: Apache-2.0
"""The references of the collectives, against exact arithmetic where that can be had."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from nvcomm.reference import collectives as reference

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.17e-38, 3.4e38, -3.4e38, 1.0, -1.0]


def round_to_f32(value: Fraction) -> float:
    """The FP32 nearest to an exact value, ties to even, as torch never computes it: by searching the neighbours."""
    if value == 0:
        return 0.0
    sign, magnitude = (-1, -value) if value < 0 else (1, value)
    exponent = math.floor(math.log2(magnitude)) if magnitude > Fraction(1, 2**1000) else -1000
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    steps = magnitude / unit
    floor = steps.numerator // steps.denominator
    rest = steps - floor
    floor += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1)
    rounded = floor * unit
    return sign * (math.inf if rounded >= Fraction(2) ** 128 else float(rounded))


def random_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """FP32 of random bits whose exponents lie close enough together for sums to round in every way."""
    bits = torch.randint(0, 1 << 23, (count,), generator=generator, dtype=torch.int32)
    exponent = torch.randint(100, 150, (count,), generator=generator, dtype=torch.int32) << 23
    sign = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int32) << 31
    return (bits | exponent | sign).view(torch.float32)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, NaNs apart: any NaN equals any other."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    equal = (left.contiguous().view(bits) == right.contiguous().view(bits)) | (left.isnan() & right.isnan())
    return left.shape == right.shape and left.dtype == right.dtype and bool(equal.all())


def test_fma_rounds_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (random_bits(4000, generator) for _ in range(3))
    # Half of the addends cancel the product, or lie half a unit from it: where two roundings differ from one.
    product = (a.double() * b.double()).float()
    c[::4] = -product[::4]
    c[1::4] = product[1::4] * 2.0**24
    # Products that lie on a tie of FP32 but for a piece far below FP64's reach of it, of both signs.
    a[-4:], b[-4:] = torch.tensor([1.0, 1.0, -1.0, -1.0]) * (1 + 2.0**-12), 1 + 2.0**-12
    c[-4:] = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 2.0**-60
    found = reference.fma(a, b, c)
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        want = round_to_f32(Fraction(x) * Fraction(y) + Fraction(z))
        assert struct.pack("f", value) == struct.pack("f", want), (x, y, z)
    assert not torch.equal(found, a * b + c), "no case in which rounding twice differs: the test proves nothing"


def test_fma_of_special_values() -> None:
    values = torch.tensor(SPECIAL)
    a, b, c = (grid.flatten() for grid in torch.meshgrid(values, values, values, indexing="ij"))
    found = reference.fma(a, b, c)
    wide = (a.double() * b.double() + c.double()).float()
    assert same(torch.where(wide.isfinite(), 0, found), torch.where(wide.isfinite(), 0, wide))
    assert same(reference.fma(*(torch.tensor([v]) for v in (1.0, -0.0, -0.0))), torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("world_size", "tree"),
    [
        (1, 0),
        (2, (0, 1)),
        (3, ((0, 1), 2)),
        (4, ((0, 1), (2, 3))),
        (5, (((0, 1), (2, 3)), 4)),
        (6, (((0, 1), (2, 3)), (4, 5))),
        (7, (((0, 1), (2, 3)), ((4, 5), 6))),
        (8, (((0, 1), (2, 3)), ((4, 5), (6, 7)))),
    ],
)
def test_R13_the_tree(world_size: int, tree: object, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(4096, generator=generator) for _ in range(world_size)]

    def add(node: object) -> torch.Tensor:
        return parts[node] if isinstance(node, int) else add(node[0]) + add(node[1])  # type: ignore[index]

    assert torch.equal(reference.tree_sum(parts), add(tree))
    left_to_right = parts[0]
    for part in parts[1:]:
        left_to_right = left_to_right + part
    assert torch.equal(left_to_right, add(tree)) == (world_size <= 3), "another order gives other bits from 4 ranks on"


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_R13_all_reduce_rounds_once(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(8192, generator=generator).to(dtype) for _ in range(4)]
    found = reference.all_reduce(xs)
    exact = sum(x.double() for x in xs)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    if dtype != torch.float32:
        assert not torch.equal(found, (xs[0] + xs[1]) + (xs[2] + xs[3])), "rounding each addition gives other bits"


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_special_values_survive_a_sum(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL).to(dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    values[values == 0] = smallest
    for other in (0.0, -0.0):
        assert same(reference.all_reduce([values, torch.full_like(values, other)]), values)
    assert same(reference.all_reduce([torch.full((2,), -0.0, dtype=dtype)] * 3), torch.full((2,), -0.0, dtype=dtype))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 12])
def test_reduce_scatter_splits_all_rows(rows: int) -> None:
    xs = [torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + r for r in range(4)]
    parts = reference.reduce_scatter(xs)
    assert torch.equal(torch.cat(parts), reference.all_reduce(xs))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def mhc_inputs(rows: int, hidden: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, hidden, generator=generator).bfloat16()
    residual = torch.randn(rows, 4, hidden, generator=generator).bfloat16()
    post, pre = torch.rand(2, rows, 4, generator=generator)
    comb = torch.rand(rows, 4, 4, generator=generator)
    weight = torch.randn(hidden, generator=generator).bfloat16()
    return y, residual, post, comb, pre, weight


def test_mhc_is_the_formula(seed: int) -> None:
    y, residual, post, comb, pre, weight = mhc_inputs(7, 64, seed)
    new, h = reference.mhc_boundary(y, residual, post, comb, pre, weight, 1e-20)
    want = post.double()[:, :, None] * y.double()[:, None] + torch.einsum(
        "mst,msh->mth", comb.double(), residual.double()
    )
    assert (new.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    collapsed = torch.einsum("mt,mth->mh", pre.double(), new.double()).bfloat16().double()
    normed = collapsed * torch.rsqrt((collapsed**2).mean(-1, keepdim=True) + 1e-20) * weight.double()
    assert h is not None
    assert (h.double() - normed).abs().max() <= 2.0**-7 * normed.abs().max()
    transposed, _ = reference.mhc_boundary(y, residual, post, comb.transpose(1, 2), pre, weight, 1e-20)
    assert not torch.equal(new, transposed)
    alone, nothing = reference.mhc_boundary(y, residual, post, comb, None, None, 0.0)
    assert nothing is None
    assert torch.equal(alone, new)


def test_mhc_sees_the_rounded_sum(seed: int) -> None:
    y, residual, post, comb, pre, weight = mhc_inputs(16, 64, seed)
    xs = [y, y.flip(0), (y * 0.37).bfloat16(), (y * 1.9).bfloat16()]
    new, _ = reference.all_reduce_mhc(xs, residual, post, comb, pre, weight, 1e-20)
    again, _ = reference.mhc_boundary(reference.all_reduce(xs), residual, post, comb, pre, weight, 1e-20)
    assert torch.equal(new, again)
    unrounded = reference.tree_sum([x.float() for x in xs])
    mixed = unrounded[:, None] * post[:, :, None]
    for s in range(4):
        mixed = reference.fma(residual[:, s, None].float(), comb[:, s, :, None], mixed)
    assert not torch.equal(new, mixed.bfloat16()), "rounding the sum first makes no difference: the test proves nothing"


def test_finalize_in_order_and_rows_not_held(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randn(40, 64, generator=generator).bfloat16()
    weights = torch.rand(9, 6, generator=generator)
    indices = torch.randint(-1, 40, (9, 6), generator=generator, dtype=torch.int32)
    indices[0] = -1
    shared = torch.randn(9, 64, generator=generator).bfloat16()
    found = reference.moe_finalize(experts, weights, indices, shared)
    assert torch.equal(found[0], shared[0])
    want = shared.double()
    for row in range(9):
        for k in range(6):
            if indices[row, k] >= 0:
                want[row] += weights[row, k].double() * experts[indices[row, k]].double()
    assert (found.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    assert torch.equal(reference.moe_finalize(experts, weights, torch.full_like(indices, -1), None), shared * 0)
    none_held = reference.moe_finalize(experts[:0], weights, torch.full_like(indices, -1), shared)
    assert torch.equal(none_held, shared)


def test_a_row_not_held_is_never_multiplied() -> None:
    experts = torch.full((1, 64), math.nan).bfloat16()
    shared = torch.ones(1, 64).bfloat16()
    found = reference.moe_finalize(experts, torch.ones(1, 6), torch.full((1, 6), -1, dtype=torch.int32), shared)
    assert torch.equal(found, shared)
