# SPDX-License-Identifier: Apache-2.0
"""One rank of a peer world: gathers eager and captured, a fault with reset, and what ranks disagree on.

torchrun --nproc-per-node 4 tests/multi/peer_gathers.py
mpiexec -n 4 python tests/multi/peer_gathers.py
"""

from __future__ import annotations

import os
import sys
import time

import torch

import nvcomm
from nvcomm.group import from_environment, from_mpi
from tests.kernel.worlds import coded, words_of

SIZES = (1, 3, 4, 1000, 16384, 5, 262144, 70, 1)


def ranks_of_this_run() -> nvcomm.group.StoreGroup:
    """torchrun's ranks, else MPI's."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return from_environment(60.0)
    from mpi4py import MPI

    return from_mpi(MPI.COMM_WORLD)


def check(comm: nvcomm.Communicator, out: torch.Tensor, wants: list[torch.Tensor], what: str) -> None:
    if not torch.equal(out, torch.stack(wants)):
        raise SystemExit(f"rank {comm.rank}: wrong data, {what}")


def eager(comm: nvcomm.Communicator) -> None:
    for call, size in enumerate((*SIZES, *reversed(SIZES))):
        wants = [words_of(("random", "mixed")[call % 2], size, 10 * call + rank) for rank in range(comm.world_size)]
        check(comm, comm.all_gather(wants[comm.rank]), wants, f"eager, {size} words")


def captured(comm: nvcomm.Communicator, replays: int) -> None:
    """Two graphs of three gathers of different sizes, in turn, with inputs that change."""
    trios = ((4, 1024, 16), (2048, 4, 64))
    turn = torch.zeros(1, dtype=torch.int32, device=comm.device)
    wrong = torch.zeros(1, dtype=torch.int64, device=comm.device)
    graphs = []
    for trio in trios:
        bases = [[coded(rank, i, size) for rank in range(comm.world_size)] for i, size in enumerate(trio)]
        xs = [torch.zeros_like(base[0]) for base in bases]
        outs = [torch.zeros((comm.world_size, size), dtype=torch.int32, device=comm.device) for size in trio]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            turn.add_(3)
            for base, x in zip(bases, xs, strict=True):
                torch.add(base[comm.rank], turn, out=x)
            for x, out in zip(xs, outs, strict=True):
                comm.all_gather(x, out)
            for base, out in zip(bases, outs, strict=True):
                wrong.add_((out != torch.stack(base) + turn).sum())
        graphs.append((graph, bases, xs, outs))
    for replay in range(replays):
        graphs[replay % 2][0].replay()
    torch.cuda.synchronize()
    comm.check()
    if wrong.item():
        raise SystemExit(f"rank {comm.rank}: {wrong.item()} wrong words in {replays} replays")


def fault(group: nvcomm.group.StoreGroup, device: torch.device) -> None:
    """The last rank misses a call; every other rank is told so in time, and reset brings all back."""
    last = group.world_size - 1
    with nvcomm.Communicator(group, device, max_bytes=4096, timeout_s=1.0) as comm:
        x = coded(comm.rank, 1, 8)
        comm.all_gather(x)
        torch.cuda.synchronize()
        group.barrier("before the fault", 60)
        if comm.rank != last:
            start = time.perf_counter()
            comm.all_gather(x)
            torch.cuda.synchronize()
            if time.perf_counter() - start > 2.0:
                raise SystemExit("the timeout took too long")
            try:
                comm.check()
            except nvcomm.PeerTimeoutError as error:
                if (error.src_rank, error.generation) != (last, 1):
                    raise SystemExit(f"wrong report: {error}") from error
            else:
                raise SystemExit("no timeout was reported")
        comm.reset()
        eager_sizes = [coded(rank, 2, 900) for rank in range(comm.world_size)]
        check(comm, comm.all_gather(eager_sizes[comm.rank]), eager_sizes, "after reset")
        torch.cuda.synchronize()
        group.barrier("after the fault", 60)


def elsewhere(comm: nvcomm.Communicator) -> None:
    """A communicator works on its own GPU, whichever is the current one."""
    x = torch.arange(8, dtype=torch.float32, device=comm.device) + comm.rank
    parts = [x.cpu() + rank - comm.rank for rank in range(comm.world_size)]
    with torch.cuda.device((comm.device.index + 1) % torch.cuda.device_count()):
        gathered, summed = comm.all_gather(x), comm.all_reduce(x)
        torch.cuda.synchronize(comm.device)
    if not torch.equal(gathered.cpu(), torch.stack(parts)) or not torch.equal(summed.cpu(), torch.stack(parts).sum(0)):
        raise SystemExit(f"rank {comm.rank}: wrong data with another GPU as the current one")


def main() -> None:
    group = ranks_of_this_run()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", group.rank)))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for pdl in ("safe", "early"):
        with nvcomm.Communicator(group, device, pdl=pdl, timeout_s=20.0) as comm:
            eager(comm)
            captured(comm, 500)
            if pdl == "safe":
                elsewhere(comm)
            torch.cuda.synchronize()
            group.barrier(f"{pdl} done", 60)
            dirty = comm.audit().dirty_words
            if dirty:
                raise SystemExit(f"rank {comm.rank}: {dirty} dirty words")
    fault(group, device)
    try:
        nvcomm.Communicator(group, device, max_bytes=4096 + 16 * group.rank, timeout_s=20.0)
    except nvcomm.CapabilityError as error:
        if "max_bytes" not in str(error):
            raise SystemExit(f"wrong refusal: {error}") from error
    else:
        raise SystemExit("ranks that disagree were not refused")
    sys.stdout.write(f"rank {group.rank} of {group.world_size} on {device}: all steps passed\n")


if __name__ == "__main__":
    main()
