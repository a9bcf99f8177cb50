# SPDX-License-Identifier: Apache-2.0
"""Top-k by sorting every column: the deterministic answer, and the check that any answer has to pass."""

from __future__ import annotations

import torch

BLOCK_COLUMNS = 8
NEG_INF_KEY = 0x0080


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """BF16 values as int32 keys in the same order: zeros equal, NaN of either sign above +inf, all keys positive."""
    bits = logits.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    magnitude = bits & 0x7FFF
    keys = torch.where(bits > 0x7FFF, 0x8000 - magnitude, 0x8000 + magnitude)
    return torch.where(magnitude > 0x7F80, 0xFFFF, keys)


def valid_keys(logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Keys of (rows, columns) logits; 0, below every key, where the column is not below the row's length."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(columns < lengths[:, None], order_keys(logits), 0)


def block_keys(logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(rows, blocks) keys of the maxima over 8 columns each; 0 where a block begins at or past the row's length.

    A NaN in a block makes the block's key that of NaN: it is the largest.
    """
    rows, columns = logits.shape
    blocks = -(-columns // BLOCK_COLUMNS)
    padded = torch.zeros(rows, blocks * BLOCK_COLUMNS, dtype=torch.int32, device=logits.device)
    padded[:, :columns] = valid_keys(logits, lengths)
    return padded.view(rows, blocks, BLOCK_COLUMNS).amax(dim=2)


def select(keys: torch.Tensor, k: int) -> torch.Tensor:
    """(rows, k) int32: columns of the k largest keys above 0, ties to the smaller column, ascending, then -1."""
    rows, columns = keys.shape
    if columns < k:
        keys = torch.nn.functional.pad(keys, (0, k - columns))
        columns = k
    # One integer decides both: key first, then the smaller column.
    index = torch.arange(columns, device=keys.device)
    order = keys.to(torch.int64) * columns + (columns - 1 - index)
    chosen = order.topk(k, dim=1).indices
    chosen = torch.where(keys.gather(1, chosen) > 0, chosen, columns).sort(dim=1).values
    return torch.where(chosen < columns, chosen, -1).to(torch.int32)


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """(rows, k) int32: the columns that `decode_topk(..., deterministic=True)` selects."""
    return select(valid_keys(logits, lengths), k)


def topk_blocks(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """(rows, k) int32: what `decode_topk_blocks` selects: the newest block, the best others ascending, -1."""
    newest = (lengths.clamp(0, logits.shape[1]) - 1).div(BLOCK_COLUMNS, rounding_mode="floor")[:, None]
    keys = block_keys(logits, lengths)
    taken = torch.arange(keys.shape[1], device=keys.device) == newest
    others = select(torch.where(taken | (keys == NEG_INF_KEY), 0, keys), k - 1)
    return torch.cat([newest.to(torch.int32), others], dim=1)


def explain_mismatch(keys: torch.Tensor, k: int, indices: torch.Tensor) -> str | None:
    """Says what is wrong with (rows, k) `indices` as a top-k of `keys`, in any order; None if nothing is.

    Args:
        keys: (rows, columns) int32, 0 where there is nothing to select.
        k: elements wanted.
        indices: int32; -1 where a row has fewer than k.
    """
    rows, columns = keys.shape
    if tuple(indices.shape) != (rows, k) or indices.dtype != torch.int32:
        return f"indices are {indices.dtype} {tuple(indices.shape)}, not int32 {(rows, k)}"
    wanted = select_values(keys, k)
    outside = (indices < -1) | (indices >= columns)
    if outside.any():
        row = int(outside.any(dim=1).nonzero()[0])
        return f"row {row}: index {int(indices[row][outside[row]][0])} is outside of 0..{columns - 1}"
    padded = torch.nn.functional.pad(keys, (0, 1))
    chosen = padded.gather(1, torch.where(indices < 0, columns, indices).long())
    chosen = chosen.sort(dim=1, descending=True).values
    different = (chosen != wanted).any(dim=1)
    if different.any():
        row = int(different.nonzero()[0])
        place = int((chosen[row] != wanted[row]).nonzero()[0])
        return (
            f"{int(different.sum())} of {rows} rows, first row {row}: the {place}-th largest selected key is "
            f"{int(chosen[row, place])}, torch.topk has {int(wanted[row, place])}"
        )
    ordered = indices.sort(dim=1).values
    repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)
    if repeated.any():
        return f"row {int(repeated.nonzero()[0])} has an index twice"
    return None


def select_values(keys: torch.Tensor, k: int) -> torch.Tensor:
    """(rows, k) the largest keys, descending, 0 where there are fewer."""
    if keys.shape[1] < k:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]))
    return keys.topk(k, dim=1).values
