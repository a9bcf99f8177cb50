# SPDX-License-Identifier: Apache-2.0
"""The oracle of sums in numpy: what a rank contributes and has to find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nvcomm.reference import collectives as reference
from stress import oracle, sum_oracle
from stress.host_oracle import HostOracle, Words, row_keys, words
from stress.sum_oracle import COMB, EPS, POST, PRE, STREAMS

HIDDEN = 256
Bf16 = torch.Tensor


class SumOracle:
    """What ranks contribute and find.

    Args:
        host: payloads of the run.
        hidden: values of a boundary's row.
    """

    def __init__(self, host: HostOracle, reserved_per_65536: int, hidden: int = HIDDEN) -> None:
        self._host = host
        self._reserved = np.uint32(reserved_per_65536)
        self._hidden = hidden

    def contribution(self, rank: int, gather: int, replay: int, num_words: int) -> Bf16:
        """(num_words, 2) what a rank adds to a sum."""
        return contribution(self._host.row(rank, gather, replay, num_words))

    def total(self, gather: int, replay: int, num_words: int) -> Bf16:
        """(num_words, 2) the sum."""
        return total(self._host.rows(gather, replay, num_words))

    def boundary(self, gather: int, replay: int, rows: int) -> Case:
        """A boundary of so many rows, of all ranks."""
        ranks, width = self._host.ranks, self._hidden // 2
        row = np.repeat(np.arange(rows, dtype=np.uint32), width)
        index = np.arange(rows * width, dtype=np.uint32)
        keys = row_keys(self._host.seed_key, ranks, gather, replay)
        some = sum_oracle.reserved_in(row, self._reserved, np.uint32)
        payload = oracle.payload(keys[:, None], index[None, :], some[None, :], np.uint32)
        key = sum_oracle.common_key(words(self._host.seed_key), words(gather), words(replay), np.uint32)
        streams = oracle.payload(key, np.arange(rows * STREAMS * width, dtype=np.uint32), np.uint32(0), np.uint32)

        def factors(base: int, count: int) -> torch.Tensor:
            at = np.arange(rows * count, dtype=np.uint32) + np.uint32(base)
            return torch.from_numpy(sum_oracle.small(key, at, 2, np.uint32).astype(np.float32))

        return Case(
            [contribution(one).view(rows, self._hidden) for one in payload],
            bf16_pairs(streams & np.uint32(sum_oracle.HALF)).view(rows, STREAMS, self._hidden),
            factors(POST, STREAMS).view(rows, STREAMS),
            factors(COMB, STREAMS * STREAMS).view(rows, STREAMS, STREAMS),
            factors(PRE, STREAMS).view(rows, STREAMS) + 1,
        )


@dataclass(frozen=True)
class Case:
    """A boundary: rank r's contribution at `xs[r]`, and what all ranks share."""

    xs: list[Bf16]
    residual: Bf16
    post: torch.Tensor
    comb: torch.Tensor
    pre: torch.Tensor

    def wanted(self, weight: Bf16) -> tuple[Bf16, Bf16]:
        """New residual streams and normed output."""
        mixes = (self.residual, self.post, self.comb, self.pre, weight, EPS)
        new_residual, h = reference.all_reduce_mhc(self.xs, *mixes)
        assert h is not None
        return new_residual, h


def bf16_pairs(numbers: Words) -> Bf16:
    """(..., 2) whole numbers in the halves of words, as bf16."""
    return torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint16).astype(np.float32)).bfloat16().view(-1, 2)


def contribution(payload: Words) -> Bf16:
    """(num_words, 2) what a rank with this payload adds to a sum; a reserved word as it is."""
    pairs = bf16_pairs(sum_oracle.numbers(payload, np.uint32))
    lost = torch.from_numpy(sum_oracle.is_reserved(payload, np.uint32).astype(bool))
    raw = torch.from_numpy(payload.view(np.int16).copy()).view(torch.bfloat16).view(-1, 2)
    return torch.where(lost[:, None], raw, pairs)


def total(payloads: Words) -> Bf16:
    """(num_words, 2) the sum over ranks with these payloads, (ranks, num_words)."""
    sums, lost = sum_oracle.total(list(payloads), np.uint32)
    return bf16_pairs(sums).masked_fill(torch.from_numpy(lost.astype(bool))[:, None], torch.nan)


def wrong_words(seen: Bf16, want: Bf16, ulps: int = 0) -> Words:
    """Indices of the pairs that differ, NaN being equal to NaN; `ulps` for numbers of one sign alone."""
    near = (seen.contiguous().view(torch.int16).int() - want.view(torch.int16).int()).abs() <= ulps
    right = torch.where(seen.isnan() | want.isnan(), seen.isnan() & want.isnan(), near)
    return np.flatnonzero(~right.reshape(-1, 2).all(-1).numpy()).astype(np.uint32)
