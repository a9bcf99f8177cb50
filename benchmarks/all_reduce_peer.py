# SPDX-License-Identifier: Apache-2.0
"""All-reduce between processes, beside PyTorch's symmetric-memory all-reduces in the same run.

Four processes on one GPU, under MPS:

    nvidia-cuda-mps-control -d
    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 OMP_NUM_THREADS=1
    torchrun --nproc-per-node 4 -m benchmarks.all_reduce_peer

or a process for each GPU of this machine: torchrun --nproc-per-node gpu -m benchmarks.all_reduce_peer

Each process replays a graph of back-to-back calls; what is printed is rank 0's median. Data is checked before and
after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import nvcomm
from benchmarks.all_reduce import all_equal
from benchmarks.graphs import capture
from nvcomm.collectives.all_reduce import choose
from nvcomm.reference import collectives as reference

SIZES = (16, 1024, 61_440, 491_520, 1_966_080)
# bytes -> most that ours may take of what PyTorch's one-shot takes: four processes on one H200
RATIOS = {16: 0.55, 1024: 0.55, 61_440: 0.6, 491_520: 0.8, 1_966_080: 0.8}
CALLS, TRIALS, REPLAYS = 50, 7, 4
Op = Callable[[], torch.Tensor]


def contributions(num_bytes: int, world_size: int) -> list[torch.Tensor]:
    """Every rank's bf16 input, the same on all ranks."""
    generator = torch.Generator(device="cuda").manual_seed(num_bytes)
    return [torch.randn(num_bytes // 2, device="cuda", generator=generator).bfloat16() for _ in range(world_size)]


def median_us(op: Op, is_right: Callable[[torch.Tensor], bool]) -> float:
    """Median time of a call inside a graph, all ranks beginning together."""
    results: list[torch.Tensor] = []
    op()
    torch.cuda.synchronize()
    dist.barrier()
    graph = capture(lambda: results.append(op()), CALLS, torch.cuda.Stream())
    samples = []
    for trial in range(TRIALS + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        if trial:
            samples.append((time.perf_counter() - start) / REPLAYS / CALLS * 1e6)
        elif not is_right(results[-1]):
            raise SystemExit("wrong data before the timing")
    if not is_right(results[-1]):
        raise SystemExit("wrong data after the timing")
    return statistics.median(samples)


def ours(comm: nvcomm.Communicator, xs: list[torch.Tensor], protocol: str) -> float:
    """Our all-reduce: bit for bit the reference's."""
    x, want = xs[comm.rank], reference.all_reduce(xs)
    out = torch.zeros_like(x)
    median = median_us(lambda: comm.all_reduce(x, out, protocol=protocol), lambda y: all_equal([y], want))
    comm.check()
    return median


def theirs(xs: list[torch.Tensor], one_shot: bool) -> float:
    """PyTorch's: near the reference. The two-shot one works in place, on zeros here: sums would grow."""
    group = dist.group.WORLD
    x = symm_mem.empty(xs[0].numel(), dtype=torch.bfloat16, device=xs[0].device)
    symm_mem.rendezvous(x, group)
    if one_shot:
        x.copy_(xs[dist.get_rank()])
    else:
        x.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    want = reference.all_reduce(xs) if one_shot else torch.zeros_like(xs[0])
    name = "one_shot_all_reduce" if one_shot else "two_shot_all_reduce_"
    call = getattr(torch.ops.symm_mem, name)
    return median_us(
        lambda: call(x, "sum", group.group_name),
        lambda y: torch.allclose(y.float(), want.float(), rtol=0.02, atol=0.05),
    )


def verdict(num_bytes: int, ratio: float) -> str:
    """The ratio, and whether it meets the bar where there is one for that size."""
    bar = RATIOS.get(num_bytes)
    return f"{ratio:.2f}" if bar is None else f"{ratio:.2f} ({bar}: {'met' if ratio <= bar else 'MISSED'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes a rank, even")
    parser.add_argument("--pdl", choices=("early", "safe", "off"), default="early")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(
            f"# {torch.cuda.get_device_name()}, {date.today()}, torch {torch.__version__}, {world_size} processes on "
            f"{min(world_size, torch.cuda.device_count())} GPUs, bf16, pdl {options.pdl}\n"
            "| bytes a rank | LL, us | two-shot, us | auto takes | symm_mem one-shot, us | symm_mem two-shot, us "
            "| auto/one-shot |\n"
            "|---|---|---|---|---|---|---|",
            flush=True,
        )
    with nvcomm.Communicator(
        dist.group.WORLD, device, max_bytes=max(options.sizes), timeout_s=10, pdl=options.pdl, device_share=1.0
    ) as comm:
        comm.prepare("all_reduce", torch.bfloat16)
        dist.barrier()
        for num_bytes in options.sizes:
            xs = contributions(num_bytes, world_size)
            mine = {protocol: ours(comm, xs, protocol) for protocol in ("ll", "two_shot")}
            peers = [theirs(xs, one_shot) for one_shot in (True, False)]
            taken = choose("auto", num_bytes, world_size)
            if rank == 0:
                print(
                    f"| {num_bytes} | {mine['ll']:.2f} | {mine['two_shot']:.2f} | {taken} | {peers[0]:.2f} "
                    f"| {peers[1]:.2f} | {verdict(num_bytes, mine[taken] / peers[0])} |",
                    flush=True,
                )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
