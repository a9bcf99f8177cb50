# SPDX-License-Identifier: Apache-2.0
"""One rank of a peer world: top-k with the rows divided over the ranks equals the undivided one, eager and captured.

torchrun --nproc-per-node 4 tests/multi/peer_topk.py
mpiexec -n 4 python tests/multi/peer_topk.py
"""

from __future__ import annotations

import os
import sys

import torch

import nvcomm
from decode.sharded_topk import owned_rows, sharded_topk
from decode.topk import decode_topk
from tests.multi.peer_gathers import ranks_of_this_run
from tests.topk_data import make_rows

K = 512
COLUMNS = 32_768


def rows_agree(comm: nvcomm.Communicator, rows: int) -> None:
    """Each rank has the logits of its own rows alone; lengths change between replays."""
    logits = make_rows("random", rows, COLUMNS, 5, "cuda")
    own = torch.full_like(logits, float("nan"))
    mine = owned_rows(rows, comm.rank, comm.world_size)
    own[mine.start : mine.stop] = logits[mine.start : mine.stop]
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    draws = torch.randint(-3, COLUMNS + 1, (8, rows), generator=torch.Generator().manual_seed(rows)).int().cuda()

    def check(out: torch.Tensor, what: str) -> None:
        if not torch.equal(out, decode_topk(logits, lengths, K, deterministic=True)):
            raise SystemExit(f"rank {comm.rank}: wrong indices, {rows} rows, {what}")

    lengths.copy_(draws[0])
    check(sharded_topk(comm, own, lengths, K, deterministic=True), "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        out = sharded_topk(comm, own, lengths, K, deterministic=True)
    for draw in draws:
        lengths.copy_(draw)
        graph.replay()
        torch.cuda.synchronize()
        check(out, "replayed")


def main() -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with nvcomm.Communicator(ranks_of_this_run(), device) as comm:
        for rows in (1, 5, 12):
            rows_agree(comm, rows)
        comm.check()
        sys.stdout.write("all steps passed\n")


if __name__ == "__main__":
    main()
