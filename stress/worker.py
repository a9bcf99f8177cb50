# SPDX-License-Identifier: Apache-2.0
"""One rank of the host world: a forked process that replays the plan and writes its line of the status page."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nvcomm.env import settings
from nvcomm.errors import CapabilityError, GroupError, PeerTimeoutError, UnsupportedError
from nvcomm.group import StoreGroup
from nvcomm.host import HostEngine, open_memory
from stress import oracle
from stress.host_oracle import Words
from stress.page import Field, State, StatusPage
from stress.plan import Plan, Sizes
from stress.run import FIRST_GENERATION, RunConfig

ORDER_CHUNK = 256
# A Python rank is some fifty times slower than a kernel: the late rank sleeps as much longer.
LATE_FACTOR = 50
# How long ranks wait for each other before and after the replays: on a busy machine they start seconds apart.
SETUP_S = 30.0
_PR_SET_PDEATHSIG = 1


def main(rank: int, config: RunConfig, plan: Plan, page: StatusPage, rendezvous: Path) -> None:
    """Runs one rank, and never raises: what went wrong is on the page."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank survives its parent
    torch.set_num_threads(1)
    line = page.line(rank)
    try:
        store = dist.FileStore(str(rendezvous), config.ranks)
        setup_s = max(config.timeout_s, SETUP_S)
        store.set_timeout(timedelta(seconds=setup_s))
        group = StoreGroup(store, rank, config.ranks, "stress")
        memory, layout = open_memory(group, plan.config.max_bytes, setup_s)
        with memory, HostEngine(memory, layout, group, **engine_options(config)) as engine:
            replays = _rank_type(config)(engine, config, plan, page)
            group.barrier("stress/begins", setup_s)
            replays.replay()
            group.barrier("stress/ended", setup_s)
            facts = {"audit": asdict(engine.audit()), "stats": asdict(engine.stats())}
        page.set_text(rank, json.dumps(facts))
        line[Field.STATE] = State.DONE
    except PeerTimeoutError as error:
        for field, value in (
            (Field.WAIT_SRC_RANK, error.src_rank),
            (Field.WAIT_GENERATION, error.generation),
            (Field.WAIT_SLOT, error.slot),
            (Field.WAIT_WORD, error.word),
            (Field.WAIT_US, int(error.waited_s * 1e6)),
            (Field.WAIT_ROOT_RANK, error.root_rank),
        ):
            line[field] = value
        line[Field.STATE] = State.TIMED_OUT
    except (UnsupportedError, CapabilityError) as error:
        page.set_text(rank, str(error))
        line[Field.STATE] = State.UNSUPPORTED
    except GroupError as error:
        page.set_text(rank, str(error))
        line[Field.STATE] = State.ALONE
    except BaseException:  # the parent reports it
        page.set_text(rank, traceback.format_exc())
        line[Field.STATE] = State.FAILED
    os._exit(0)


def _rank_type(config: RunConfig) -> type[HostRank]:
    if config.op == "all_gather":
        return HostRank
    from stress.host_sums import HostSumRank

    return HostSumRank


def engine_options(config: RunConfig) -> dict[str, Any]:
    """Options of the engine."""
    return {
        "timeout_s": config.timeout_s,
        "generation": FIRST_GENERATION,
        "device_checks": settings().device_checks,
        "mutations": frozenset({"late-copy"} if config.protocol == "late-copy" else ()),
        "transport": "delayed" if config.transport == "delayed" else "direct",
        "seed": config.seed,
    }


class HostRank:
    """Replays on one engine.

    Args:
        engine: the rank's collectives.
        config: what to run.
        plan: the same on every rank.
        page: the status page.
    """

    def __init__(self, engine: HostEngine, config: RunConfig, plan: Plan, page: StatusPage) -> None:
        self._engine = engine
        self._config = config
        self._plan = plan
        self._line = page.line(engine.rank)
        self._stop_line = page.line(0)
        self._oracle = plan.oracle
        gathers, ranks = oracle.GATHERS_PER_REPLAY, engine.world_size
        self._xs = [torch.zeros(plan.max_words, dtype=torch.int32) for _ in range(gathers)]
        self._outs = [torch.zeros(plan.max_words * ranks, dtype=torch.int32) for _ in range(gathers)]

    def replay(self) -> None:
        """Replays until the run is over.

        How many replays a run of a given duration has, rank 0 decides: it writes the number of the last one to the
        page before it publishes anything in it. Whoever has collected rank 0's words of that replay sees the number,
        as x86-64 keeps stores in order.
        """
        line, stop_line = self._line, self._stop_line
        wanted = self._config.replay_limit
        deadline = self._config.duration_s
        line[Field.STATE] = State.RUNNING
        started = time.monotonic_ns()
        line[Field.STARTED_NS] = started
        replay = 0
        while replay < wanted:
            if replay % ORDER_CHUNK == 0:
                order = self._plan.order(replay, ORDER_CHUNK)
            if self._engine.rank == 0 and deadline is not None and time.monotonic_ns() - started > deadline * 1e9:
                stop_line[Field.STOP_AFTER] = replay
            self._one(replay, int(order[replay % ORDER_CHUNK]))
            if stop_line[Field.STOP_AFTER] <= replay:
                break
            replay += 1
        line[Field.ENDED_NS] = time.monotonic_ns()

    def _one(self, replay: int, graph: int) -> None:
        spec = self._plan.graphs[graph]
        sizes: Sizes = spec.replays[0]
        rank, line = self._engine.rank, self._line
        for gather, words in enumerate(sizes):
            self._fill(gather, replay, words)
        if spec.late_rank == rank:
            time.sleep(self._oracle.late_ns(replay) * LATE_FACTOR / 1e9)
        for gather, words in enumerate(sizes):
            line[Field.GATHER] = gather
            self._gather(gather, words)
            if spec.spaced:
                self._check(gather, replay, words)
        if not spec.spaced:
            for gather, words in enumerate(sizes):
                self._check(gather, replay, words)
        line[Field.GATHER] = 0
        line[Field.REPLAY] = replay + 1

    def _fill(self, gather: int, replay: int, words: int) -> None:
        row = self._oracle.row(self._engine.rank, gather, replay, words)
        self._xs[gather].numpy().view(np.uint32)[:words] = row

    def _gather(self, gather: int, words: int) -> None:
        out = self._outs[gather][: words * self._engine.world_size]
        self._engine.all_gather(self._xs[gather][:words], out)

    def _check(self, gather: int, replay: int, words: int) -> None:
        ranks = self._engine.world_size
        seen: Words = self._outs[gather].numpy().view(np.uint32)[: words * ranks].reshape(ranks, words)
        wrong = seen != self._oracle.rows(gather, replay, words)
        count = int(np.count_nonzero(wrong))
        line = self._line
        if count and not line[Field.BAD_WORDS]:
            src_rank, index = (int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
            line[Field.BAD_REPLAY : Field.BAD_SEEN + 1] = (
                replay, gather, src_rank, index, int(seen[src_rank, index])
            )  # fmt: skip
        line[Field.BAD_WORDS] += count
        line[Field.GATHERS] += 1
