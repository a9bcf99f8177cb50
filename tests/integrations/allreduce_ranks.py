# SPDX-License-Identifier: Apache-2.0
"""One rank of a tensor-parallel group: `CustomAllreduce` as vLLM and SGLang use it, against gloo's sums and gathers.

torchrun --nproc-per-node 3 tests/integrations/allreduce_ranks.py cpu
torchrun --nproc-per-node 4 tests/integrations/allreduce_ranks.py cuda      (all on one GPU, or one each)
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist

from nvcomm.integrations.custom_allreduce import CustomAllreduce

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(shape, rank, call, dtype=torch.bfloat16, device="cpu"):
    """Small whole numbers, another for each rank, call and place: sums of them are exact in every dtype."""
    size = torch.Size(shape).numel()
    return ((torch.arange(size) * 7 + 5 * rank + 3 * call) % 17 - 8).reshape(shape).to(device=device, dtype=dtype)


def check(out, want, what):
    if out is None or out.shape != want.shape or out.dtype != want.dtype or not torch.equal(out.cpu(), want.cpu()):
        raise SystemExit(f"rank {dist.get_rank()}: wrong result, {what}: {out}, wanted {want}")


def require(condition, what):
    if not condition:
        raise SystemExit(f"rank {dist.get_rank()}: {what}")


def gloo_sum(x):
    total = x.cpu().to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total.to(x.dtype)


def gloo_gather(x):
    parts = [torch.empty_like(x, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.cpu())
    return torch.cat(parts)


def data(ar, rank, world_size, device):
    for call, rows in enumerate((1, 6, 64, 257)):
        for dtype in DTYPES:
            x = numbers((rows, 24), rank, call, dtype, device)
            require(ar.should_custom_ar(x), f"{dtype} is not taken")
            check(ar.custom_all_reduce(x), gloo_sum(x), f"all-reduce of {rows} rows, {dtype}")
            check(ar.custom_all_gather(x), gloo_gather(x), f"all-gather of {rows} rows, {dtype}")
            x = numbers((rows * world_size, 24), rank, call, dtype, device)
            want = gloo_sum(x)[rank * rows : (rank + 1) * rows]
            check(ar.custom_reduce_scatter(x), want, f"reduce-scatter of {rows} rows, {dtype}")
    # Bits that mean nothing as a number, and an odd count of bytes.
    x = numbers((5, 3), rank, 1, torch.int8, device) * 31
    check(ar.custom_all_gather(x), gloo_gather(x), "all-gather of bytes")
    # Strides other than the plain ones: what a compiler was promised is what comes.
    x = numbers((6, 40), rank, 2, torch.bfloat16, device).t()
    total = ar.custom_all_reduce(x)
    check(total, gloo_sum(x), "all-reduce of columns")
    require(total.stride() == x.stride(), "an all-reduce changed the strides")


def refusals(ar, rank, world_size, device):
    big = torch.zeros(ar.max_size // 2 + 1, dtype=torch.bfloat16, device=device)
    require(ar.custom_all_reduce(big) is None, "too large an input was taken")
    require(ar.custom_all_reduce(torch.zeros(4, dtype=torch.int64, device=device)) is None, "a sum of integers")
    require(ar.custom_all_gather(numbers((4, 6), rank, 0, device=device).t()) is None, "columns were gathered")
    rows = torch.zeros(world_size + 1, 8, device=device)
    require(ar.custom_reduce_scatter(rows) is None, "rows that do not split evenly were taken")
    require(not ar.should_mnnvl_multimem_reduce_scatter(rows[:world_size]), "a kernel of vLLM's own was promised")
    # With batch invariance any size is summed here, in pieces that give the same bits as a whole.
    ar.batch_invariant, size = True, ar.max_size
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(device)
    whole = ar.custom_all_reduce(x)
    ar.max_size = 400
    require(torch.equal(ar.custom_all_reduce(x), whole), "pieces have other bits than the whole")
    require(ar.custom_reduce_scatter(rows[:world_size]) is None, "batch invariance: a reduce-scatter was taken")
    ar.batch_invariant, ar.max_size = False, size


def warm_up(ar, rank, device):
    x = numbers((6, 24), rank, 3, device=device)
    with ar.capture():
        before = ar.comm.stats().calls
        zeros = ar.custom_all_reduce(x)
        check(zeros, torch.zeros_like(x), "all-reduce in a warm-up")
        require(ar.comm.stats().calls == before, "a warm-up communicated")
        check(ar.custom_all_gather(x), gloo_gather(x), "all-gather in a warm-up")
    require(ar.comm.stats().calls == before + 1, "the gather of a warm-up did not communicate")
    check(ar.custom_all_reduce(x), gloo_sum(x), "all-reduce after a warm-up")


def captured(ar, rank, world_size, device):
    """All three in one graph, warmed up as a server does it, replayed with inputs that change."""
    x = numbers((6 * world_size, 24), rank, 0, device=device)
    with ar.capture():
        for operation in (ar.custom_all_reduce, ar.custom_all_gather, ar.custom_reduce_scatter):
            operation(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = ar.custom_all_reduce(x), ar.custom_all_gather(x), ar.custom_reduce_scatter(x)
    for call in range(40):
        x.copy_(numbers(x.shape, rank, call))
        graph.replay()
        torch.cuda.synchronize()
        total = gloo_sum(x)
        check(results[0], total, f"captured all-reduce, replay {call}")
        check(results[1], gloo_gather(x), f"captured all-gather, replay {call}")
        check(results[2], total[6 * rank : 6 * rank + 6], f"captured reduce-scatter, replay {call}")


def ends(ar, device):
    """Closed by name, by nobody but the garbage collector, and where ranks disagree never opened."""
    x = torch.ones(8, device=device)
    ar.close()
    ar.close()
    require(ar.disabled and ar.custom_all_reduce(x) is None and ar.custom_all_gather(x) is None, "closed, and taking")
    dropped = CustomAllreduce(dist.group.WORLD, device)
    check(dropped.custom_all_reduce(x), gloo_sum(x), "the second one of this group")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del dropped
        gc.collect()

    class Differing(CustomAllreduce):
        log = logging.getLogger("differing")

        @classmethod
        def options(cls):
            return super().options() | {"max_bytes": 4096 << dist.get_rank()}

    said = []
    Differing.log.addHandler(type("Keep", (logging.Handler,), {"emit": lambda self, record: said.append(record)})())
    off = Differing(dist.group.WORLD, device)
    require(off.disabled and off.custom_all_reduce(x) is None, "ranks that disagree were not refused")
    require(len(said) == 1 and "max_bytes" in said[0].getMessage(), f"the reason was not logged: {said}")


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    ar = CustomAllreduce(group=dist.group.WORLD, device=device)
    require(not ar.disabled and ar.fully_connected and ar.world_size == world_size, "it is off")
    # Where graphs are replayed, and only there, somebody has to look for what broke.
    require((ar._watcher is not None) == (device.type == "cuda"), "watched, or not")
    data(ar, rank, world_size, device)
    refusals(ar, rank, world_size, device)
    warm_up(ar, rank, device)
    if device.type == "cuda":
        captured(ar, rank, world_size, device)
    dist.barrier()
    ends(ar, device)
    dist.barrier()
    sys.stdout.write(f"rank {rank} of {world_size} on {device}: all steps passed\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
