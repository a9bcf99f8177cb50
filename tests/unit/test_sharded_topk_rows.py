# SPDX-License-Identifier: Apache-2.0
"""How sharded_topk divides rows, by ranks called one after the other. In worlds: tests/host, tests/kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.sharded_topk import owned_rows, rows_per_rank, sharded_topk
from decode.topk import decode_topk
from nvcomm.errors import UsageError
from tests.topk_data import make_rows


def lengths_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 192), st.integers(1, 8))
def test_every_row_is_owned_once_and_in_order(rows, world_size):
    owned = [row for rank in range(world_size) for row in owned_rows(rows, rank, world_size)]
    assert owned == list(range(rows))
    assert max(len(owned_rows(rows, rank, world_size)) for rank in range(world_size)) == rows_per_rank(rows, world_size)


@dataclass
class LockstepWorld:
    """Ranks that are called one after the other, twice: first to learn what each sends, then to deliver it."""

    world_size: int
    rank: int = 0
    sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def all_gather(self, x, out=None):
        self.sent[self.rank] = x.clone()
        if len(self.sent) == self.world_size:
            out.copy_(torch.stack([self.sent[r] for r in range(self.world_size)]))
        return out


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_sharded_equals_unsharded(rows, world_size, seed):
    logits = make_rows("random", max(rows, 1), 904, seed, "cpu")[:rows]
    lengths = lengths_of([904, 30, 513, -1, 0, 899, 700, 512][:rows])
    world = LockstepWorld(world_size)
    for turn in range(2):
        for rank in range(world_size):
            world.rank = rank
            mine = owned_rows(rows, rank, world_size)
            only_mine = torch.full_like(logits, float("nan"))
            only_mine[mine.start : mine.stop] = logits[mine.start : mine.stop]
            out = sharded_topk(world, only_mine, lengths, 512)
            if turn == 1:
                assert torch.equal(out, decode_topk(logits, lengths, 512))


def test_more_rows_than_one_call_takes(seed):
    """192 rows a rank: each is one call's worth, all of them are not."""
    logits, lengths = make_rows("random", 384, 16, seed, "cpu"), lengths_of([9, 0, 16] * 128)
    world = LockstepWorld(2)
    for rank in (0, 1):
        world.rank = rank
        out = sharded_topk(world, logits, lengths, 512)
    halves = [decode_topk(logits[half], lengths[half], 512) for half in (slice(192), slice(192, None))]
    assert torch.equal(out[:192], world.sent[0])
    assert torch.equal(out, torch.cat(halves))


BAD = {
    "lengths of fewer rows": {"lengths": lengths_of([600] * 4)},
    "lengths of more rows": {"lengths": lengths_of([600] * 6)},
    "rows that begin between vectors": {"logits": torch.zeros(5, 602, dtype=torch.bfloat16)[:, :600]},
    "rows that overlap": {"logits": torch.zeros(1, 600, dtype=torch.bfloat16).expand(5, 600)},
    "more rows than ranks take": {
        "logits": torch.zeros(577, 8, dtype=torch.bfloat16),
        "lengths": lengths_of([8] * 577),
    },
    "k": {"k": 100},
    "no tensor": {"logits": None},
    "the buffer of what is sent": {"local": torch.zeros(1, 512)},
    "the buffer of what comes": {"gathered": torch.zeros(2, 2, 512, dtype=torch.int32)},
    "a buffer elsewhere": {"gathered": torch.zeros(3, 2, 512, dtype=torch.int32, device="meta")},
}


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_every_rank_refuses_what_any_rank_would(change, rank):
    """Rank 2 owns one row, for which a row's stride means nothing: it has to refuse too, or it waits for the others."""
    world = LockstepWorld(3, rank)
    good = {"logits": torch.zeros(5, 600, dtype=torch.bfloat16), "lengths": lengths_of([600] * 5), "k": 512}
    sharded_topk(LockstepWorld(3, rank), **good)
    with pytest.raises(UsageError):
        sharded_topk(world, **(good | change))
    assert not world.sent


def test_splits_that_cannot_be():
    for rows, rank, world_size in ((5, 0, 0), (5, 3, 3), (5, -1, 3), (-1, 0, 3), (5.0, 0, 3)):
        with pytest.raises(UsageError, match="wanted an integer from"):
            owned_rows(rows, rank, world_size)
    with pytest.raises(UsageError, match="world_size is 0"):
        rows_per_rank(5, 0)


def test_what_is_no_communicator():
    with pytest.raises(UsageError, match="comm is a NoneType"):
        sharded_topk(None, torch.zeros(5, 600, dtype=torch.bfloat16), lengths_of([600] * 5), 512)
