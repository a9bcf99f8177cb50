# SPDX-License-Identifier: Apache-2.0
"""One of four ranks, a pipeline of two stages: a tensor-parallel group each, several classes in a process, odd inputs.

torchrun --nproc-per-node 4 tests/integrations/allreduce_groups.py      (started by test_custom_allreduce.py)
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist

from nvcomm.integrations.custom_allreduce import CustomAllreduce
from tests.integrations.allreduce_ranks import check, numbers, require

MIB = 1 << 20


def group_of(ranks_of_groups):
    """Of several groups the one that this rank is in; every rank builds all of them, as vLLM does."""
    groups = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in ranks_of_groups]
    return next((ranks, group) for ranks, group in groups if dist.get_rank() in ranks)


def total(ranks, shape, call):
    return sum(numbers(shape, rank, call) for rank in ranks)


def stages(rank):
    """Two groups at once, which know nothing of each other."""
    ranks, group = group_of([[0, 1], [2, 3]])
    ar = CustomAllreduce(group, "cpu")
    require((ar.rank, ar.world_size) == (rank % 2, 2), f"rank {ar.rank} of {ar.world_size}")
    # The second stage makes more calls than the first one.
    for call in range(5 + 20 * (rank >= 2)):
        check(ar.custom_all_reduce(numbers((3, 8), rank, call)), total(ranks, (3, 8), call), f"stage, call {call}")
    return ranks, group, ar


def several(rank, ranks, group, first):
    """Another class on the same group, and one across the stages: calls on them in turn do not mix."""
    second = CustomAllreduce(group, "cpu", max_size=64)
    across_ranks, across_group = group_of([[0, 2], [1, 3]])
    across = CustomAllreduce(across_group, "cpu")
    for call in range(4):
        for ar, members in ((first, ranks), (second, ranks), (across, across_ranks)):
            check(
                ar.custom_all_reduce(numbers((4, 8), rank, call)), total(members, (4, 8), call), f"one of three, {call}"
            )
    require(second.custom_all_reduce(numbers((5, 8), rank, 0)) is None, "more than this one's own max_size was taken")
    require(first.max_size == 4 * MIB, f"max_size {first.max_size}, of a communicator of 4 MiB and a default of 8")
    across.close()
    require(across.disabled, "not closed")
    check(first.custom_all_reduce(numbers((2, 8), rank, 9)), total(ranks, (2, 8), 9), "after another one was closed")
    second.close()


def odd_inputs(rank, ranks, ar):
    """What a caller may hand over; whether it is taken depends on nothing that differs between ranks."""
    empty = torch.zeros(0, 8, dtype=torch.bfloat16)
    check(ar.custom_all_reduce(empty), empty, "no rows")
    check(ar.custom_reduce_scatter(empty), empty, "no rows to scatter")
    scalar = torch.tensor(float(rank), dtype=torch.float32)
    check(ar.custom_all_reduce(scalar), torch.tensor(float(sum(ranks))), "a scalar")
    require(ar.custom_all_gather(scalar) is None, "a scalar has no dimension to gather along")
    require(ar.custom_reduce_scatter(scalar) is None, "a scalar has no rows")
    wide = numbers((4, 16), rank, 1)
    want = total(ranks, (4, 16), 1)
    check(ar.custom_all_reduce(wide[:, 3:11]), want[:, 3:11], "columns of a wider buffer")
    check(ar.custom_all_reduce(wide[::2]), want[::2], "every other row")
    check(ar.custom_all_reduce(wide[0].expand(3, 16)), want[0].expand(3, 16), "a row shown three times")
    check(ar.custom_all_reduce(wide.T), want.T, "columns first")
    unaligned = torch.cat([wide.view(-1)[:1], wide.view(-1)])[1:].view(4, 16)
    check(ar.custom_all_reduce(unaligned), want, "from an address that is no multiple of 16")
    graded = numbers((2, 8), rank, 2, torch.float32).requires_grad_()
    wanted = total(ranks, (2, 8), 2).float()
    for out in (ar.custom_all_reduce(graded), ar.custom_reduce_scatter(graded)):
        require(out is not None and not out.requires_grad, "a sum has no derivative here")
    check(ar.custom_all_reduce(graded), wanted, "a tensor that wants a gradient")
    with torch.inference_mode():
        check(ar.custom_all_reduce(numbers((2, 8), rank, 3)), total(ranks, (2, 8), 3), "in inference mode")
    imaginary = torch.complex(wanted, wanted).conj().imag
    require(imaginary.is_neg(), "no lazy negative")
    taken = [imaginary, torch.eye(4).to_sparse(), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta")]
    for x in taken:
        require(not ar.should_custom_ar(x) and ar.custom_all_reduce(x) is None, f"{x} was taken")
    for x in (torch.ones(2, 2, dtype=torch.complex64).conj(), torch.eye(4).to_sparse(), torch.zeros(4, device="meta")):
        require(not ar.should_custom_all_gather(x) and ar.custom_all_gather(x) is None, f"{x} was gathered")
    exact = torch.zeros(ar.max_size // 4)
    require(ar.should_custom_ar(exact) and not ar.should_custom_ar(torch.zeros(len(exact) + 1)), "the limit is not it")


def capturing(rank, ranks, ar):
    """An exception inside a capture leaves nothing behind; registering means nothing at any time."""
    x = numbers((2, 8), rank, 4)
    try:
        with ar.capture():
            check(ar.custom_all_reduce(x), torch.zeros_like(x), "a warm-up")
            torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        require("must match the size" in str(error), f"another error came: {error}")
    for _ in range(2):
        require(ar.register_graph_buffers() is None, "something was registered")
    check(ar.custom_all_reduce(x), total(ranks, x.shape, 4), "after a capture that failed")


def alone_and_closed(rank):
    """A group of one takes nothing; nor does what was closed, however often; both can be captured around."""
    _, group = group_of([[each] for each in range(4)])
    one = CustomAllreduce(group, "cpu")
    x = numbers((2, 8), rank, 5)
    for _ in range(3):
        require(one.disabled and one.max_size == 0 and not one.fully_connected, "one rank alone is on")
        for operation in ("ar", "all_gather", "reduce_scatter"):
            require(not getattr(one, f"should_custom_{operation}")(x), f"should_custom_{operation}")
        with one.capture():
            require(one.custom_all_reduce(x) is None and one.custom_all_gather(x) is None, "one rank alone took it")
        one.close()
    del one
    gc.collect()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks, group, ar = stages(rank)
    several(rank, ranks, group, ar)
    odd_inputs(rank, ranks, ar)
    capturing(rank, ranks, ar)
    alone_and_closed(rank)
    ar.close()
    ar.close()
    require(ar.register_graph_buffers() is None and not ar.should_custom_ar(torch.ones(8)), "closed, and taking")
    ar.disabled = False  # as servers do around some of their work
    require(ar.custom_all_reduce(torch.ones(8)) is None, "switched on behind its end")
    dist.barrier()
    sys.stdout.write(f"rank {rank}: all steps passed\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
