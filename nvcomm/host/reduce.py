# SPDX-License-Identifier: Apache-2.0
"""What all host reductions share: the one order of addition (docs/mailbox.md R13), and words that may travel.

A reduction needs no escape: a NaN's payload bits do not survive a sum, so a word that equals a reserved one is
replaced by another NaN before it travels (R5). Everything else, -0.0 and denormals too, travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nvcomm.arguments import REDUCED_DTYPES
from nvcomm.errors import UsageError
from nvcomm.host.words import ESCAPE_WORD, Bytes, Words

# A NaN as fp32, and as two bf16 or fp16 halves.
_OTHER_NAN = np.uint32(0xFFC0FFC0)


def check_dtype(operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises UsageError unless `x` can be summed into `out`."""
    if x.dtype not in REDUCED_DTYPES or out.dtype != x.dtype:
        raise UsageError(f"{operation}: got {x.dtype} into {out.dtype}; wanted one of bf16, fp16, fp32 into the same.")


def without_reserved(words: Words) -> Words:
    """The words to send; `words` itself where none is reserved."""
    reserved = np.equal(np.bitwise_or(words, np.uint32(1)), ESCAPE_WORD)
    return np.where(reserved, _OTHER_NAN, words) if np.count_nonzero(reserved) else words


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in FP32: split at the largest power of two below the number of parts, sum each half so, and add (R13)."""
    if len(parts) == 1:
        return parts[0]
    split = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:split]) + tree_sum(parts[split:])


def sum_of(contributions: Bytes, dtype: torch.dtype) -> Bytes:
    """The bytes of the sum, rounded to `dtype` once. `contributions`: (world_size, num_bytes), whole elements."""
    if not contributions.size:
        return contributions[0]
    rows = torch.from_numpy(contributions).view(dtype).float()
    total = tree_sum(list(rows)).to(dtype)
    result: Bytes = total.view(torch.uint8).numpy()
    return result


def part(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where rank's part of `total` things begins and ends; the first `total % world_size` ranks have one more."""
    each, more = divmod(total, world_size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
