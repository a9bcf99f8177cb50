# SPDX-License-Identifier: Apache-2.0
"""What every collective computes, in plain torch: slow, on any device, and bit for bit what the kernels compute.

A reference takes the inputs of all ranks, rank r's at index r, and returns what every rank has to find. Three rules
make the bits the same everywhere (docs/mailbox.md R13):

- a sum over ranks is one fixed tree of FP32 additions, and is rounded to the tensors' dtype once;
- every other step says whether it is an `fma` (one rounding) or a product and a sum (two);
- what follows a rounding sees the rounded value.

NaNs compare as NaN: their payload bits do not survive a sum. RMSNorm is exact here, computed in FP64; a kernel's may
differ by one unit in the last place of BF16, as long as FP32 holds the squares that it adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_gather(xs: Sequence[Tensor]) -> Tensor:
    """Every rank's `x` (*shape), in rank order: (world_size, *shape), bit for bit."""
    return torch.stack(list(xs))


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of FP32 tensors over the ranks, in the order of R13.

    The ranks are split at the largest power of two below their number, both halves are summed in the same way, and
    the two sums are added: ((r0 + r1) + (r2 + r3)) for four ranks, ((r0 + r1) + r2) for three.
    """
    if len(parts) == 1:
        return parts[0]
    split = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:split]) + tree_sum(parts[split:])


def all_reduce(xs: Sequence[Tensor]) -> Tensor:
    """Sum of every rank's `x` (*shape): one FP32 tree, rounded to the dtype of `x` once."""
    return tree_sum([x.float() for x in xs]).to(xs[0].dtype)


def reduce_scatter(xs: Sequence[Tensor]) -> list[Tensor]:
    """The sum of every rank's `x` (rows, *rest), split over the ranks by rows: rank r's part at index r.

    The first `rows % world_size` ranks own one row more than the others; a rank may own none.
    """
    return list(torch.tensor_split(all_reduce(xs), len(xs)))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of FP32 tensors with a single rounding.

    The product of two FP32 values is exact in FP64. Its sum with `c` is rounded to odd there, which keeps what a second
    rounding, to FP32, has to know.
    """
    product = a.double() * b.double()
    addend = c.double().expand(product.shape)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)  # total + error is the exact sum
    inexact = torch.isfinite(error) & (error != 0) & ((total.contiguous().view(torch.int64) & 1) == 0)
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    return torch.where(inexact, odd, total).float()


def mhc_boundary(
    y: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """The end of one sublayer and the start of the next: post-mix of the residual streams, collapse, RMSNorm.

    For each row, with streams s and t from 0 to hc - 1:

        mixed[t]  = y * post[t]                            a product
        mixed[t]  = residual[s] * comb[s, t] + mixed[t]    an fma for each s, in order
        new[t]    = bf16(mixed[t])
        collapsed = new[0] * pre[0]                        a product
        collapsed = new[t] * pre[t] + collapsed            an fma for each t from 1 on, in order
        h         = RMSNorm(bf16(collapsed)) * norm_weight

    Args:
        y: (rows, hidden) bf16, the reduced output of the sublayer.
        residual: (rows, hc, hidden) bf16.
        post: (rows, hc) fp32.
        comb: (rows, hc, hc) fp32, source stream first.
        pre: (rows, hc) fp32; None: no collapse.
        norm_weight: (hidden,) bf16; may be None where `pre` is.
        eps: added to the mean square.

    Returns:
        The new residual streams (rows, hc, hidden) bf16, and h (rows, hidden) bf16 or None.
    """
    num_streams = residual.shape[1]
    streams = []
    for t in range(num_streams):
        mixed = y.float() * post[:, t, None]
        for s in range(num_streams):
            mixed = fma(residual[:, s].float(), comb[:, s, t, None], mixed)
        streams.append(mixed.to(y.dtype))
    new = torch.stack(streams, dim=1)
    if pre is None or norm_weight is None:
        return new, None
    collapsed = new[:, 0].float() * pre[:, 0, None]
    for t in range(1, num_streams):
        collapsed = fma(new[:, t].float(), pre[:, t, None], collapsed)
    return new, rms_norm(collapsed.to(y.dtype), norm_weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, hidden) / sqrt(mean(x * x) + eps) * weight (hidden,), in FP64, rounded to the dtype of `x`."""
    wide = x.double()
    return (wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def moe_finalize(experts: Tensor, row_weights: Tensor, row_indices: Tensor, shared: Tensor | None) -> Tensor:
    """A rank's MoE output from the outputs of its experts, which still lie in expert order.

        sum = experts[row_indices[k]] * row_weights[k] + sum    an fma for each k in order, from 0; none where -1
        sum = sum + shared                                      a sum
        out = bf16(sum)

    Args:
        experts: (expert rows, hidden) bf16.
        row_weights: (rows, top_k) fp32.
        row_indices: (rows, top_k) int32, a row of `experts`, or -1: this rank does not hold that expert.
        shared: (rows, hidden) bf16, the shared expert's output, or None.

    Returns:
        (rows, hidden) bf16: what this rank contributes to the all-reduce.
    """
    total = torch.zeros(row_indices.shape[0], experts.shape[1], dtype=torch.float32, device=experts.device)
    for k in range(row_indices.shape[1]):
        index = row_indices[:, k].long()
        held = (index >= 0)[:, None]
        if experts.shape[0]:
            added = fma(experts[index.clamp(min=0)].float(), row_weights[:, k, None], total)
            total = torch.where(held, added, total)
    if shared is not None:
        total = total + shared.float()
    return total.to(experts.dtype)


def all_reduce_mhc(
    xs: Sequence[Tensor],
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """`mhc_boundary` of the all-reduced `xs`: the sum is rounded to bf16 first, as an all-reduce alone would do."""
    return mhc_boundary(all_reduce(xs), residual, post, comb, pre, norm_weight, eps)
