# SPDX-License-Identifier: Apache-2.0
"""Rows that have broken top-k kernels, by name; for tests of `decode.topk` on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

Generator = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def _one_hot(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    x = torch.zeros_like(x)
    at = torch.randint(x.shape[1], (x.shape[0], 1), generator=g, device=x.device)
    return x.scatter(1, at, 5.0)


def _sprinkle(value: float, share: float) -> Generator:
    def apply(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=g, device=x.device) < share
        return torch.where(mask, value, x)

    return apply


def _negative_nan(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    bits = _sprinkle(float("nan"), 0.001)(x, g).to(torch.bfloat16).view(torch.int16).clone()
    return torch.where(bits == 0x7FC0, -64, bits).view(torch.bfloat16)  # 0xFFC0


def _burst(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    x = x.clone()
    begin = x.shape[1] // 3
    x[:, begin : begin + 700] += 20
    return x


def _periodic(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """All that is large meets the same few threads of one CTA of any cluster: candidate lists overflow."""
    column = torch.arange(x.shape[1], device=x.device)
    return torch.where(column % 65536 < 256, x.abs() + 8, x)


def _every_pattern(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    bits = torch.randint(-(1 << 15), 1 << 15, x.shape, generator=g, device=x.device, dtype=torch.int32)
    return bits.to(torch.int16).view(torch.bfloat16)


def _ramp(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-3, 3, x.shape[1], device=x.device).expand_as(x)


KINDS: dict[str, Generator] = {
    "random": lambda x, g: x,
    "narrow": lambda x, g: 1 + x.abs() * 0.004,  # three BF16 values: vLLM #51782
    "constant": lambda x, g: torch.full_like(x, -1.5),
    "rising": lambda x, g: _ramp(x),
    "falling": lambda x, g: -_ramp(x),
    "two_values": lambda x, g: (x > 1).to(x.dtype),
    "one_hot": _one_hot,
    "all_nan": lambda x, g: torch.full_like(x, float("nan")),
    "some_nan": _sprinkle(float("nan"), 0.001),
    "negative_nan": _negative_nan,
    "one_inf": _sprinkle(float("inf"), 1e-5),
    "many_inf": _sprinkle(float("inf"), 0.2),
    "mostly_neg_inf": _sprinkle(float("-inf"), 0.999),
    "all_neg_inf": lambda x, g: torch.full_like(x, float("-inf")),
    "signed_zeros": lambda x, g: torch.where(x > 0, 0.0, -0.0),
    "negative": lambda x, g: -x.abs() - 1,
    "tiny": lambda x, g: x * 1e-38,
    "wide": lambda x, g: torch.exp(x * 20) * torch.sign(x),
    "every_pattern": _every_pattern,
    "burst": _burst,
    "periodic": _periodic,
}


def make_rows(kind: str, rows: int, columns: int, seed: int, device: str, stride: int | None = None) -> torch.Tensor:
    """(rows, columns) bf16 with row stride `stride`; what lies between rows is NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device)
    buffer = torch.full((rows, stride or -(-columns // 8) * 8), float("nan"), dtype=torch.bfloat16, device=device)
    view = buffer[:, :columns]
    view.copy_(KINDS[kind](x, generator).to(torch.bfloat16))
    return view
