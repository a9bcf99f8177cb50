# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, forked from one that has imported torch: they may be killed, or leave what they changed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nvcomm.group import StoreGroup


def exit_codes(world_size: int, work: Callable[[int], Any], limit_s: float = 150.0) -> list[int | None]:
    """Calls `work(rank)` in a process for each rank; their exit codes: 1 where it raised, which is printed."""

    def one_rank(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            work(rank)
        except BaseException:
            sys.stderr.write(f"rank {rank}: {traceback.format_exc()}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    ranks = [multiprocessing.get_context("fork").Process(target=one_rank, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(limit_s)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def run_scenario(scenarios: Mapping[str, Callable[[StoreGroup], Any]]) -> int:
    """`SCENARIO WORLD_SIZE STORE` of the command line: 0 if every rank did what its scenario expects.

    In the scenario `killed` rank 1 is.
    """
    scenario, world_size, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    def work(rank: int) -> None:
        scenarios[scenario](StoreGroup(dist.FileStore(store, world_size), rank, world_size, scenario))

    seen = exit_codes(world_size, work)
    expected = [-signal.SIGKILL if scenario == "killed" and rank == 1 else 0 for rank in range(world_size)]
    if seen != expected:
        sys.stderr.write(f"exit codes {seen}, expected {expected}\n")
    return int(seen != expected)
