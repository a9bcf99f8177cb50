# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a measurement between processes: check, time, check again; then all ranks' samples are one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nvcomm.bench.boundary import fused
from nvcomm.bench.case import Case
from nvcomm.bench.contender import Contender
from nvcomm.bench.plan import Plan
from nvcomm.bench.result import Result
from nvcomm.communicator import Communicator
from nvcomm.group import StoreGroup

# What ranks tell each other fits one call of any communicator of the bench.
LEAST_MAX_BYTES = 64 << 10
TURNS = 8


def cases_of(plan: Plan, world_size: int) -> list[Case]:
    """The sizes to measure; what rounds to the same case is measured once."""
    return list(dict.fromkeys(Case.of_size(plan.op, plan.datatype, world_size, size) for size in plan.sizes))


def max_bytes_of(cases: list[Case]) -> int:
    """What a communicator for all of them is built with."""
    return max(LEAST_MAX_BYTES, *(case.input_count * case.dtype.itemsize for case in cases))


def options_of(plan: Plan) -> dict[str, Any]:
    """How the communicator, or the world, is built."""
    return {"protocol": plan.protocol, "pdl": plan.pdl, "device_share": plan.device_share}


def measure(plan: Plan, group: StoreGroup, device: torch.device) -> Iterator[Result]:
    """Row by row, on every rank; whom `plan.against` names follows each of ours."""
    cases = cases_of(plan, group.world_size)
    with Communicator(group, device, max_bytes=max_bytes_of(cases), **options_of(plan)) as comm:
        if plan.reduce_op is not None:
            comm.prepare(plan.reduce_op, cases[0].dtype)
        ours = fused(comm) if plan.op == "all_reduce_mhc" else getattr(comm, plan.op)
        all_of_them = [Contender("nvcomm", ours, ours)]
        if plan.against or plan.vllm_library:
            from nvcomm.bench.against import contenders

            all_of_them += contenders(plan, group, comm, max_bytes_of(cases))
        for case in cases:
            for contender in all_of_them:
                yield _row_or_refusal(plan, group, comm, case, contender)
        group.barrier("nvcomm.bench.end", plan.timeout_s)


def _row_or_refusal(plan: Plan, group: StoreGroup, comm: Communicator, case: Case, contender: Contender) -> Result:
    """A row; where another than nvcomm does not take the size or the dtype, which is so on every rank, why not."""
    if contender.name.startswith("nvcomm"):
        return _row(plan, group, comm, case, contender)
    try:
        return _row(plan, group, comm, case, contender)
    except RuntimeError as error:  # torch raises nothing narrower
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return Result(case, contender.name, [], None, refused=first_line)


def _row(plan: Plan, group: StoreGroup, comm: Communicator, case: Case, contender: Contender) -> Result:
    wrong = _check(group, comm, case, contender) if plan.check else None
    if wrong:
        return Result(case, contender.name, [], wrong)
    x, out = case.input(comm.rank, 0).to(comm.device), case.output(comm.device).zero_()
    if contender.load is not None:
        contender.load(x)
    times = _timer(comm.device)(plan, lambda: contender.timed(x, out))
    comm.check()
    if plan.check:
        left = case.count_wrong(out, comm.rank, 0) if contender.leaves_result else 0
        wrong = _check(group, comm, case, contender) + _sum(group, left)
    # A call of a collective is as long as its slowest rank's.
    samples = _of_all_ranks(comm, torch.tensor(times, dtype=torch.float64, device=comm.device)).amax(0)
    return Result(case, contender.name, samples.tolist(), wrong)


def _check(group: StoreGroup, comm: Communicator, case: Case, contender: Contender) -> int:
    """Wrong elements over all ranks in a few turns, of other data each.

    Two small calls, two large ones, and so on: each slot of the mailbox sees one size after the other.
    """
    small = case.third()
    wrong = 0
    for turn in range(1, TURNS + 1):
        shown = case if turn % 4 // 2 else small
        x, out = shown.input(comm.rank, turn).to(comm.device), shown.output(comm.device)
        contender.call(x, out)
        wrong += shown.count_wrong(out, comm.rank, turn)
    return _sum(group, wrong)


def _sum(group: StoreGroup, wrong: int) -> int:
    """Told through the store, not by the collective that may be the wrong one."""
    return sum(int(str(each)) for each in group.exchange("nvcomm.bench.wrong", wrong, 60.0))


def _of_all_ranks(comm: Communicator, samples: torch.Tensor) -> torch.Tensor:
    """(world_size, len(samples)), gathered in pieces that fit."""
    pieces = samples.split(LEAST_MAX_BYTES // samples.itemsize)
    return torch.cat([comm.all_gather(piece.contiguous()) for piece in pieces], 1).cpu()


def _timer(device: torch.device) -> Callable[[Plan, Callable[[], object]], list[float]]:
    """(plan, call) -> microseconds, as many on every rank."""
    if device.type == "cpu":
        return wall_times
    from nvcomm.bench.graphs import graph_times

    return graph_times


def wall_times(plan: Plan, call: Callable[[], object]) -> list[float]:
    """Of each call by itself, in microseconds."""
    clock = time.perf_counter_ns
    for _ in range(plan.warmup_iters):
        call()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(plan.iters):
            start = clock()
            call()
            times.append((clock() - start) / 1e3)
    finally:
        gc.enable()
    return times
