# SPDX-License-Identifier: Apache-2.0
"""Collectives, eager and compiled, give what torch.distributed gives; and a communicator of a part of its group.

`python test_torch_parity.py FOLDER` is what the test starts: it forks 2 ranks, then 3, which meet in that folder.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import nvcomm
from nvcomm.integrations import torch_ops
from tests.host.compiled_program import PROGRAM, unused_and_twice
from tests.host.forked import exit_codes

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_parity_with_torch_distributed_in_2_and_3_processes(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def whole(shape, dtype, seed):
    """Small whole numbers: their sums are exact in every dtype here, in any order."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_gloo(x):
    """all-gather, all-reduce and reduce-scatter of `x`, by torch.distributed."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    rows = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(rows, x)
    total = x.clone()
    dist.all_reduce(total)
    return torch.stack(rows), total, total.tensor_split(world_size)[rank]


def parity(rank, world_size):
    with nvcomm.Communicator(dist.group.WORLD, "cpu", max_bytes=1 << 16, timeout_s=60.0) as comm:
        ops = torch_ops.register(comm, "parity")
        for seed, shape in enumerate([(1,), (2, 3), (7, 5), (64, 33), (world_size * 4, 16)]):
            for dtype in DTYPES:
                x = whole(shape, dtype, 100 * seed + rank)
                wanted = by_gloo(x)
                for got in (
                    (comm.all_gather(x), comm.all_reduce(x), comm.reduce_scatter(x)),
                    (ops.all_gather(x), ops.all_reduce(x), ops.reduce_scatter(x)),
                ):
                    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (shape, dtype)
        step = torch.compile(unused_and_twice(ops), backend="aot_eager", fullgraph=True)
        for seed in range(3):
            x = whole((4, 6), torch.float32, 7 * seed + rank)
            calls = comm.stats().calls
            y, last = step(x)
            gathered, _, part = by_gloo(x)
            assert comm.stats().calls == calls + len(PROGRAM)
            assert torch.equal(last, part)
            assert torch.equal(y, by_gloo((gathered * 4).flatten(0, 1))[2] + 1)
        assert comm.audit().dirty_words == 0
        dist.barrier()


def part_of_the_group(rank):
    """A communicator of a process group that leaves rank 0 of two, or of three, out."""
    members = list(range(1, dist.get_world_size()))
    group = dist.new_group(members)
    if rank in members:
        with nvcomm.Communicator(group, "cpu", max_bytes=64, timeout_s=60.0) as comm:
            assert (comm.rank, comm.world_size) == (members.index(rank), len(members))
            assert comm.all_gather(torch.tensor([rank])).flatten().tolist() == members
            dist.barrier(group)


def one_rank(rank, world_size, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    parity(rank, world_size)
    part_of_the_group(rank)
    dist.barrier()


def main():
    importlib.import_module("torch._dynamo")  # here, once: it takes seconds
    codes = []
    for world_size in (2, 3):
        store = str(Path(sys.argv[1]) / f"store{world_size}")
        codes += exit_codes(world_size, functools.partial(one_rank, world_size=world_size, store=store), 45.0)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
