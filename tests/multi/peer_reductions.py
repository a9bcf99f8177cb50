# SPDX-License-Identifier: Apache-2.0
"""One rank of a peer world: reductions and the sublayer boundary, mixed with gathers, against their references.

torchrun --nproc-per-node 4 tests/multi/peer_reductions.py
mpiexec -n 4 python tests/multi/peer_reductions.py
"""

from __future__ import annotations

import os
import sys

import torch

import nvcomm
from nvcomm.group import as_group
from nvcomm.reference import collectives as reference
from tests.mhc_cases import check, make_case, stepped

HIDDEN = 5120
ROWS = (1, 6, 48, 3, 192, 7, 384, 1, 96, 2)  # growing and shrinking in one mailbox
PROTOCOLS = ("ll", "two_shot")
REPLAYS = 500


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wrong: {what}")


def eager(comm, boundary, cases, order) -> None:
    """LL only, two-shot only, both in turn, or both mixed with gathers and reduce-scatters."""
    for rows, case in zip(ROWS, cases, strict=True):
        mine, want = case.xs[comm.rank], reference.all_reduce(case.xs)
        for protocol in PROTOCOLS if order in ("both", "mixed") else (order,):
            got = comm.all_reduce(mine, protocol=protocol)
            expect(torch.equal(got, want), f"all_reduce {protocol}, {rows} rows")
            check([boundary(mine, *case.common(), protocol=protocol)], case)
        if order == "mixed":
            expect(torch.equal(comm.all_gather(mine), torch.stack(case.xs)), f"all_gather, {rows} rows")
            part = reference.reduce_scatter(case.xs)[comm.rank]
            expect(torch.equal(comm.reduce_scatter(mine), part), f"reduce_scatter, {rows} rows")


def replayed(comm, boundary) -> None:
    """A graph of all of it, replayed with inputs that change, checked on the device."""
    rows, world_size = 6, comm.world_size
    case = make_case(world_size, rows, HIDDEN, 1, "cuda")
    index = torch.arange(rows * HIDDEN, device="cuda").view(rows, HIDDEN)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    bad = torch.zeros(1, dtype=torch.int64, device="cuda")
    x, outs = torch.zeros_like(case.xs[0]), [torch.zeros_like(case.xs[0]) for _ in PROTOCOLS]
    gathered = torch.zeros((world_size, rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
    results = [case.outputs() for _ in PROTOCOLS]
    mixes = case.common()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        counter.add_(1)
        x.copy_(stepped(index, comm.rank, counter))
        for protocol, out, (new_residual, h) in zip(PROTOCOLS, outs, results, strict=True):
            comm.all_reduce(x, out, protocol=protocol)
            boundary(x, *mixes, new_residual=new_residual, h=h, protocol=protocol)
            comm.all_gather(x, gathered)
        want = sum(stepped(index, r, counter).float() for r in range(world_size)).bfloat16()
        for out in outs:
            bad.add_((out != want).sum())
        bad.add_((gathered.float().sum(0).bfloat16() != want).sum())
        bad.add_((results[0][0] != reference.mhc_boundary(want, *mixes)[0]).sum())
        for one, other in zip(*results, strict=True):
            bad.add_((one != other).sum())
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    expect(int(bad) == 0 and int(counter) == REPLAYS, f"{int(bad)} values in {int(counter)} replays")
    case.xs = [stepped(index, r, REPLAYS) for r in range(world_size)]
    check(results, case)


def main() -> None:
    group = as_group(None)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", group.rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with nvcomm.Communicator(group, device, max_bytes=384 * HIDDEN * 2, timeout_s=20.0) as comm:
        boundary = comm.mhc(HIDDEN)
        for op in ("all_reduce", "reduce_scatter"):
            comm.prepare(op, torch.bfloat16)
        cases = [make_case(comm.world_size, rows, HIDDEN, call, "cuda") for call, rows in enumerate(ROWS)]
        for order in (*PROTOCOLS, "both", "mixed"):
            eager(comm, boundary, cases, order)
        replayed(comm, boundary)
        comm.check()
        expect(comm.audit().dirty_words == 0, "dirty words")
        group.barrier("peer_reductions.end", 60.0)
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size}: all reductions right\n")


if __name__ == "__main__":
    main()
