# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary as the bench measures it: one hidden size, results of both kinds in one flat output.

`unfused` puts post-mix, collapse and RMSNorm behind somebody's all-reduce, through torch.compile on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nvcomm.bench.case import EPS, HIDDEN, STREAMS, mixes
from nvcomm.bench.contender import Contender

if TYPE_CHECKING:
    from nvcomm.communicator import Communicator


def fused(comm: Communicator) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Our boundary of one kernel, as a call `(x, out)`; loads it."""
    boundary = comm.mhc(HIDDEN, num_streams=STREAMS)

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        rows = x.numel() // HIDDEN
        new_residual, h = _parts(out, rows)
        residual, post, comb, pre, weight = mixes(rows, x.device)
        boundary(x.view(rows, HIDDEN), residual, post, comb, pre, weight, EPS, new_residual=new_residual, h=h)

    return call


def unfused(all_reduce: Contender) -> Contender:
    """The same boundary behind an all-reduce that knows nothing of it."""
    sums: dict[int, torch.Tensor] = {}

    def behind(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = y.numel() // HIDDEN
        compute = _compiled() if y.is_cuda else post_collapse_norm
        return compute(y.view(rows, HIDDEN), *mixes(rows, y.device))

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        y = torch.empty_like(x)
        all_reduce.call(x, y)
        for part, result in zip(_parts(out, x.numel() // HIDDEN), behind(y), strict=True):
            part.copy_(result)

    def timed(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel() not in sums:
            sums[x.numel()] = torch.zeros_like(x)
        y = sums[x.numel()]
        all_reduce.timed(x, y)
        behind(y)

    return Contender(f"{all_reduce.name}+post", call, timed, all_reduce.load, leaves_result=False)


def post_collapse_norm(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the sum, as one would write it for torch.compile; shapes as for `Communicator.all_reduce_mhc`."""
    old = [residual[:, s].float() for s in range(STREAMS)]
    new = []
    for t in range(STREAMS):
        mixed = y.float() * post[:, t, None]
        for s in range(STREAMS):
            mixed = mixed + old[s] * comb[:, s, t, None]
        new.append(mixed.bfloat16())
    collapsed = new[0].float() * pre[:, 0, None]
    for t in range(1, STREAMS):
        collapsed = collapsed + new[t].float() * pre[:, t, None]
    collapsed = collapsed.bfloat16().float()
    scale = torch.rsqrt(collapsed.square().mean(-1, keepdim=True) + EPS)
    return torch.stack(new, 1), (collapsed * scale * weight.float()).bfloat16()


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(post_collapse_norm)


def _parts(out: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual streams and h inside a flat output."""
    split = rows * STREAMS * HIDDEN
    return out[:split].view(rows, STREAMS, HIDDEN), out[split:].view(rows, HIDDEN)
