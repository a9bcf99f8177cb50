# SPDX-License-Identifier: Apache-2.0
"""sharded_topk over the host world equals the unsharded call, on every rank."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from decode.sharded_topk import owned_rows, sharded_topk
from decode.topk import decode_topk
from tests.topk_data import make_rows


@pytest.mark.parametrize(("rows", "world_size"), [(0, 2), (1, 3), (5, 3), (8, 4), (7, 1)])
def test_sharded_equals_unsharded(rows, world_size, seed):
    logits = make_rows("random", max(rows, 1), 904, seed, "cpu")[:rows]
    lengths = torch.tensor([904, 30, 513, -1, 0, 899, 700, 512][:rows], dtype=torch.int32)
    wanted = decode_topk(logits, lengths, 512)
    results: dict[int, torch.Tensor] = {}

    def call(comm: nvcomm.Communicator) -> None:
        # A rank needs the logits of its own rows alone.
        mine = owned_rows(rows, comm.rank, world_size)
        own = torch.full_like(logits, float("nan"))
        own[mine.start : mine.stop] = logits[mine.start : mine.stop]
        for _ in range(3):
            results[comm.rank] = sharded_topk(comm, own, lengths, 512)

    with nvcomm.virtual_world(world_size, device="cpu") as world:
        world.run(call)
    assert len(results) == world_size
    for result in results.values():
        assert torch.equal(result, wanted)
