# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary on CPU tensors: post-mix, collapse, RMSNorm, and the MoE output that comes before it.

Products and sums round in FP32; `fma` rounds once, as a GPU's does. Steps and their order are those that
`nvcomm.collectives.all_reduce_mhc_math` and `all_reduce_source` take.
"""

from __future__ import annotations

import numpy as np
import torch

Floats = np.ndarray


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c of float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there: where it is inexact, its last bit is set, so that
    rounding it again to float32 sees on which side of a tie the exact sum lies.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
        total = np.atleast_1d(product + addend)
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        bits = total.view(np.int64)
        even = (bits & 1) == 0
        # towards the exact sum: away from zero if the error has the sum's sign, else towards it
        away = (error > 0) == (total > 0)
        moved = np.where(away, bits + 1, bits - 1).view(np.float64)
        inexact = np.isfinite(error) & (error != 0) & even
        return np.where(inexact, moved, total).astype(np.float32).reshape(product.shape)


def boundary(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The new residual streams and the normed collapse; see `AllReduceMhc.__call__` for shapes and dtypes."""
    value, old = y.float().numpy(), residual.float().numpy()
    to_target, mix = post.numpy(), comb.numpy()
    num_streams = old.shape[1]
    new = torch.empty_like(residual)
    for t in range(num_streams):
        mixed = value * to_target[:, t, None]
        for s in range(num_streams):
            mixed = fma(old[:, s], mix[:, s, t, None], mixed)
        new[:, t] = torch.from_numpy(mixed).to(torch.bfloat16)
    if pre is None or norm_weight is None:
        return new, None
    streams, factor = new.float().numpy(), pre.numpy()
    collapsed = streams[:, 0] * factor[:, 0, None]
    for t in range(1, num_streams):
        collapsed = fma(streams[:, t], factor[:, t, None], collapsed)
    rounded = torch.from_numpy(collapsed).to(torch.bfloat16).double()
    scale = torch.rsqrt(rounded.square().mean(dim=1, keepdim=True) + eps)
    return new, (rounded * scale * norm_weight.double()).to(torch.bfloat16)


def finalize(
    experts: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """A rank's MoE output from its experts' outputs; see `AllReduceMhc.finalize`."""
    rows, hidden = indices.shape[0], experts.shape[1]
    total = np.zeros((rows, hidden), np.float32)
    outputs, factors = experts.float().numpy(), weights.numpy()
    for k in range(indices.shape[1]):
        held = np.flatnonzero(indices[:, k].numpy() >= 0)
        chosen = outputs[indices[held, k].numpy()]
        total[held] = fma(chosen, factors[held, k, None], total[held])
    if shared is not None:
        total = total + shared.float().numpy()
    return torch.from_numpy(total).to(torch.bfloat16)
