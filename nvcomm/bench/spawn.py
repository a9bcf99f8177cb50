# SPDX-License-Identifier: Apache-2.0
"""Ranks started by the command itself: a process each, and when one fails, all end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A rank that sees another fail says so itself, if it does so soon.
GRACE_S = 2.0
# Ends a rank whose own watchdog cannot.
BEYOND_TIMEOUT_S = 15.0


def run_ranks(target: Callable[..., None], world_size: int, timeout_s: float, *args: Any) -> int:
    """Runs `target(rank, world_size, store_path, *args)` in a process a rank.

    Args:
        target: a function of a module; ends its process with an exit code.
        world_size: number of ranks.
        timeout_s: the ranks end themselves then; a little later they are ended.
        *args: what `target` also gets; has to be picklable.

    Returns:
        The first exit code that was not 0, as a shell has it; else 0.
    """
    # The server imports torch once, and forks each rank from there: it has no threads, unlike this process perhaps.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nvcomm.bench.rank", target.__module__])
    with tempfile.TemporaryDirectory(prefix="nvcomm-bench-") as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=target, args=(rank, world_size, store, *args)) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start()
            return _first_failure(ranks, time.monotonic() + timeout_s + BEYOND_TIMEOUT_S)
        finally:
            for rank in ranks:
                if rank.pid is None:  # interrupted before it was started
                    continue
                if rank.is_alive():
                    rank.kill()
                rank.join()


def _first_failure(ranks: list[Any], deadline: float) -> int:
    running = dict(enumerate(ranks))
    code = 0
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            return code or 124
        multiprocessing.connection.wait([rank.sentinel for rank in running.values()], left)
        for number, rank in list(running.items()):
            if rank.exitcode is None:
                continue
            del running[number]
            if rank.exitcode and not code:
                code = rank.exitcode if rank.exitcode > 0 else 128 - rank.exitcode
                if rank.exitcode < 0:
                    sys.stderr.write(f"[rank {number}] ended by signal {-rank.exitcode}\n")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return code
