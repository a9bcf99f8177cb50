# SPDX-License-Identifier: Apache-2.0
"""Inputs of reductions that have lost bits or words, and the comparison bit for bit, for tests on any machine."""

from __future__ import annotations

import torch

from nvcomm.collectives.all_reduce_ll import AllReduceLLKernel
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.mailbox import EMPTY, ESCAPE

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REDUCING = {"ll": AllReduceLLKernel, "two_shot": AllReduceTwoShotKernel}
BITS = {2: torch.int16, 4: torch.int32}


def inputs(world_size: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Values of very different sizes, special ones, and words that may not travel."""
    generator = torch.Generator().manual_seed(seed)
    xs = []
    for _ in range(world_size):
        x = (torch.randn(count, generator=generator) * 2.0 ** torch.randint(-6, 7, (count,), generator=generator)).to(
            dtype
        )
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -6e-8], dtype=torch.float64).to(
            dtype
        )
        where = torch.randint(0, 12, (count,), generator=generator)
        x = torch.where(where < len(special), special[where.clamp(max=len(special) - 1)], x)
        words = x[: count * dtype.itemsize // 4 * 4 // dtype.itemsize].view(torch.int32)
        which = torch.randint(0, 10, words.shape, generator=generator)
        words[which == 0], words[which == 1] = EMPTY - 2**32, ESCAPE - 2**32
        xs.append(x)
    return xs


def assert_same(ys: list[torch.Tensor], want: torch.Tensor) -> None:
    bits = BITS[want.element_size()]
    for y in ys:
        wrong = ~((y.view(bits) == want.view(bits)) | (y.isnan() & want.isnan()))
        assert not wrong.any(), f"{int(wrong.sum())} of {want.numel()} wrong, first {wrong.nonzero()[0].tolist()}"
        assert torch.equal(y.view(bits), ys[0].view(bits))
