# SPDX-License-Identifier: Apache-2.0
"""One rank of a peer world: reductions and the sublayer boundary, mixed with gathers, against their references.

torchrun --nproc-per-node 4 tests/multi/peer_reductions.py
"""

from __future__ import annotations

import sys

import torch

import nvcomm
from nvcomm.group import from_environment
from nvcomm.reference import collectives as reference
from tests.mhc_cases import check, make_case

HIDDEN = 1024
ROWS = (1, 6, 48, 3, 1, 17)


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wrong: {what}")


def main() -> None:
    torch.cuda.set_device(0)
    group = from_environment(60.0)
    with nvcomm.Communicator(group, "cuda:0", max_bytes=48 * HIDDEN * 2, timeout_s=20.0) as comm:
        boundary = comm.mhc(HIDDEN)
        for call, rows in enumerate(ROWS):
            case = make_case(comm.world_size, rows, HIDDEN, call, "cuda")
            want = reference.all_reduce(case.xs)
            for protocol in ("ll", "two_shot"):
                got = comm.all_reduce(case.xs[comm.rank], protocol=protocol)
                expect(torch.equal(got, want), f"all_reduce {protocol}, {rows} rows")
                check([boundary(case.xs[comm.rank], *case.common(), protocol=protocol)], case)
            expect(torch.equal(comm.all_gather(case.xs[comm.rank]), torch.stack(case.xs)), f"all_gather, {rows} rows")
            part = comm.reduce_scatter(case.xs[comm.rank])
            expect(torch.equal(part, reference.reduce_scatter(case.xs)[comm.rank]), f"reduce_scatter, {rows} rows")
        torch.cuda.synchronize()
        comm.check()
        expect(comm.audit().dirty_words == 0, "dirty words")
        group.barrier("peer_reductions.end", 60.0)
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size}: all reductions right\n")


if __name__ == "__main__":
    main()
