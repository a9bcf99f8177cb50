# SPDX-License-Identifier: Apache-2.0
"""Top-k with the rows divided over the ranks: each selects its own, the indices travel through the all-gather.

Rows are exact and disjoint, so nothing is merged. The split is contiguous and depends on (rows, world size) alone:
every rank knows all of it without a word from the others.

    5 rows, 3 ranks       rank 0: rows 0 1    rank 1: rows 2 3    rank 2: row 4 and one row of padding
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from decode.arguments import integer_reasons, tensor_reasons
from decode.topk import decode_topk
from decode.topk_arguments import check_rows, checked_k
from decode.topk_config import MAX_ROWS
from nvcomm.errors import UsageError


@runtime_checkable
class RowCommunicator(Protocol):
    """What is asked of a communicator: `nvcomm.Communicator` has it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


def rows_per_rank(rows: int, world_size: int) -> int:
    """Rows that each rank sends; the last ranks may own fewer, or none, and pad.

    Raises:
        UsageError: there cannot be so many rows or ranks.
    """
    _check_split(rows, 0, world_size)
    return -(-rows // world_size)


def owned_rows(rows: int, rank: int, world_size: int) -> range:
    """The rows that a rank selects: score only these. Consecutive over the ranks, together all rows once.

    Raises:
        UsageError: there cannot be so many rows or ranks, or no such rank.
    """
    _check_split(rows, rank, world_size)
    share = rows_per_rank(rows, world_size)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def sharded_topk(
    comm: RowCommunicator,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    deterministic: bool = False,
    local: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """The columns of the k largest logits of each row, each row selected on one rank. Collective.

    Args:
        comm: the ranks; all of them call with the same rows, columns and k.
        logits: as for `decode_topk`, all rows, up to 192 a rank; a rank reads `owned_rows` alone, the others may hold
            anything.
        lengths: as for `decode_topk`, of all rows.
        k: as for `decode_topk`.
        deterministic: as for `decode_topk`.
        local: (rows_per_rank, k) int32 for this rank's own indices; allocated if None.
        gathered: (world_size, rows_per_rank, k) int32 for everybody's; allocated if None. Where ranks share a process
            pass both: an allocation may wait for the device, and with it for ranks that are not launched yet.

    Returns:
        (rows, k) int32, a view of `gathered` and equal on all ranks. Padding lies behind the last row: the split
        puts short ranks last, so what remains is already dense.

    Raises:
        UsageError: as `decode_topk`, or `local` or `gathered` does not fit; nothing was launched. Every rank looks at
            all rows' arguments, not at its own alone: one that raised while others went on would be waited for.

    Ordering:
        Runs on the current stream, does not block, may be captured.
    """
    if not isinstance(comm, RowCommunicator):
        raise UsageError(f"comm is a {type(comm).__name__}; wanted a Communicator, with a rank and an all_gather.")
    k = checked_k(k)
    check_rows(logits, lengths, max_rows=MAX_ROWS * comm.world_size)
    rows = logits.shape[0]
    share = rows_per_rank(rows, comm.world_size)
    owned = owned_rows(rows, comm.rank, comm.world_size)
    local = _buffer("local", local, (share, k), logits.device)
    gathered = _buffer("gathered", gathered, (comm.world_size, share, k), logits.device)
    if rows == 0:
        return gathered.view(0, k)
    mine = slice(owned.start, owned.stop)
    decode_topk(logits[mine], lengths[mine], k, local[: len(owned)], deterministic=deterministic)
    if len(owned) < share:
        local[len(owned) :].fill_(-1)
    gathered = comm.all_gather(local, out=gathered)
    return gathered.view(comm.world_size * share, k)[:rows]


def _buffer(name: str, given: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    if reasons := tensor_reasons(name, given):
        raise UsageError(f"{reasons[0]}.")
    wrong = given.dtype != torch.int32 or tuple(given.shape) != shape or given.device != device
    if wrong or not given.is_contiguous():
        raise UsageError(
            f"{name} is {given.dtype} {tuple(given.shape)} with strides {given.stride()} on {given.device}; pass "
            f"contiguous int32 {shape} on {device}."
        )
    return given


def _check_split(rows: int, rank: int, world_size: int) -> None:
    reasons = integer_reasons("rows", rows, 0, 2**31 - 1) + integer_reasons("world_size", world_size, 1, 2**31 - 1)
    reasons = reasons or integer_reasons("rank", rank, 0, world_size - 1)
    if reasons:
        raise UsageError("; ".join(reasons) + ".")
