# SPDX-License-Identifier: Apache-2.0
"""Replays on GPUs: all ranks in this process (`virtual`), or this process's rank among others (`peer`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import nvcomm
from nvcomm import group as groups
from nvcomm.errors import GroupError, PeerTimeoutError, UnsupportedError, UsageError
from stress.drive import Driver
from stress.gpu_facts import Facts, collect_facts, find_positions, find_waits, last_seen, merge_facts
from stress.gpu_rank import GpuRank
from stress.hang import Hang
from stress.plan import MAX_BYTES, SMALL_BYTES, Plan, PlanConfig, shape_for
from stress.run import FIRST_GENERATION, Outcome, Progress, RunConfig
from stress.sum_rank import SumRank
from stress.watchdog import GRACE_S, Watchdog

REPLAYS_PER_GRAPH = 8
NUM_SMALL, NUM_BIG = 96, 8
# A control needs changing sizes and no more: few graphs, quickly captured.
CONTROL_SMALL = 24
# Processes begin and end a run within so many seconds of each other: one may have waited out its timeout meanwhile.
MEET_S = 60.0

# Takes what is known then, writes the report, returns the exit code.
OnHang = Callable[[RunConfig, Outcome], int]


def plan_for(config: RunConfig) -> Plan:
    """The plan of a run on GPUs."""
    small, big, max_bytes = (CONTROL_SMALL, 0, SMALL_BYTES) if config.stop_on_bad else (NUM_SMALL, NUM_BIG, MAX_BYTES)
    shape = shape_for(config.protocol, is_control=config.stop_on_bad)
    return Plan(PlanConfig(config.seed, config.ranks, REPLAYS_PER_GRAPH, small, big, max_bytes, **shape))


class VirtualRunner:
    """All ranks are streams of this process on one GPU.

    Args:
        device: the GPU.
        on_hang: writes the report when the watchdog has to end the process.
    """

    reports = True

    def agreed(self, config: RunConfig) -> RunConfig:
        """See `Runner.agreed`: there is one process."""
        return config

    def __init__(self, device: torch.device, on_hang: OnHang) -> None:
        self._device = device
        self._on_hang = on_hang

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        """See `Runner.run`."""
        options = _world_options(config)
        with nvcomm.virtual_world(config.ranks, self._device, max_bytes=MAX_BYTES, **options) as world:
            streams = [world.stream(rank) for rank in range(config.ranks)]
            return replay(list(world), streams, config, progress, self._on_hang, Alone())

    def close(self) -> None:
        """Nothing outlives a run."""


class PeerRunner:
    """This process is one rank; torchrun (or whatever sets its variables) started the others.

    Args:
        device: this rank's GPU.
        on_hang: writes the report when the watchdog has to end the process.
    """

    def __init__(self, device: torch.device, on_hang: OnHang) -> None:
        self._device = device
        self._on_hang = on_hang
        self._group = groups.from_environment()
        self._runs = 0

    @property
    def reports(self) -> bool:
        """Rank 0 prints."""
        return self._group.rank == 0

    def agreed(self, config: RunConfig) -> RunConfig:
        """See `Runner.agreed`: rank 0's, as each process draws a seed where none is given."""
        asked = self._group.exchange("stress/config", dataclasses.asdict(config), MEET_S)
        first: dict[str, Any] = asked[0]  # type: ignore[assignment]
        odd = [rank for rank, other in enumerate(asked) if other != first | {"seed": other["seed"]}]  # type: ignore[index,call-overload]
        if odd:
            raise UsageError(f"ranks {odd} were started with other arguments than rank 0: give all of them the same.")
        return RunConfig(**first)

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        """See `Runner.run`."""
        if self._group.world_size != config.ranks:
            raise UsageError(
                f"--ranks is {config.ranks} and there are {self._group.world_size} processes: leave --ranks out."
            )
        self._runs += 1
        others = Others(self._group, f"run{self._runs}", config.timeout_s)
        options = _world_options(config)
        with nvcomm.Communicator(others.group, self._device, max_bytes=MAX_BYTES, **options) as comm:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            outcome = replay([comm], [stream], config, progress, self._on_hang, others)
            multicast = comm.engine.multicast  # type: ignore[attr-defined]
            return dataclasses.replace(outcome, transport="multicast" if multicast else "peer")

    def close(self) -> None:
        """The group ends with the process."""


class Alone:
    """All ranks are here: nobody else has to be asked."""

    def agree(self, stop: bool) -> bool:
        """Whether to stop."""
        return stop

    def gather(self, facts: Facts) -> list[Facts]:
        """Every process's facts."""
        return [facts]


class Others:
    """The other processes of a peer world; every process calls the same, in the same order.

    Args:
        group: all processes. It is not used beyond the start: ranks that leave a run at different places would be at
            different exchanges of it for ever. Each run has a group of its own, and another for its end.
        name: of the run.
        timeout_s: the run's.
    """

    def __init__(self, group: groups.StoreGroup, name: str, timeout_s: float) -> None:
        def child(part: str) -> groups.StoreGroup:
            store = group.child_store(f"stress/{name}/{part}")
            return groups.StoreGroup(store, group.rank, group.world_size, "group")

        self.group = child("run")
        self._end = child("end")
        self._agree_s = timeout_s + GRACE_S / 2
        self.group.barrier("stress/begin", MEET_S)

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop."""
        return any(self.group.exchange("stress/stop", stop, self._agree_s))

    def gather(self, facts: Facts) -> list[Facts]:
        """The facts of every process; of this one alone, and a reason, where another is gone."""
        try:
            return self._end.exchange("stress/facts", facts, MEET_S)  # type: ignore[return-value]
        except GroupError as error:
            return [facts | {"reason": facts["reason"] or str(error)}]


def replay(
    comms: Sequence[Any],
    streams: Sequence[torch.cuda.Stream],
    config: RunConfig,
    progress: Progress,
    on_hang: OnHang,
    others: Alone | Others,
) -> Outcome:
    """Replays on this process's communicators, and puts together what all processes saw."""
    plan = plan_for(config)
    ranks: list[GpuRank] = []

    def explain(reason: str) -> Hang:
        return Hang(reason, tuple(find_waits(comms)), tuple(find_positions(ranks)))

    def look(stop: bool) -> bool:
        for comm in comms:
            comm.check()
        return others.agree(stop)

    launched, seconds, reason = None, 0.0, None
    with contextlib.ExitStack() as cleanup:
        limit_s = config.timeout_s + GRACE_S
        with Watchdog(limit_s, explain, lambda hang: on_hang(config, last_seen(ranks, hang))) as watchdog:
            for comm, stream in zip(comms, streams, strict=True):
                ranks.append(_rank(config, comm, plan, stream))
                cleanup.callback(ranks[-1].close)
                ranks[-1].load()
                watchdog.beat()
            progress.stage = "replays"
            try:
                launches, seconds = Driver(ranks, plan, watchdog, look).run(config, progress)
                launched = launches * REPLAYS_PER_GRAPH
            except (PeerTimeoutError, GroupError) as error:  # GroupError: another process left
                reason = str(error)
            facts = collect_facts(comms, ranks, reason)
        return merge_facts(others.gather(facts), config.ranks, launched, seconds)


def _rank(config: RunConfig, comm: Any, plan: Plan, stream: torch.cuda.Stream) -> GpuRank:
    if config.op == "all_gather":
        return GpuRank(comm, plan, comm.device, stream)
    # The known-bad protocol has gathers alone: sums are made of them.
    return SumRank(comm, plan, comm.device, stream, config.op, emulate=config.protocol != "mailbox")


def _world_options(config: RunConfig) -> dict[str, Any]:
    return {
        "timeout_s": config.timeout_s,
        "generation": FIRST_GENERATION,
        "pdl": config.pdl,
        "protocol": config.protocol,
        "transport": config.transport,
        "seed": config.seed & 0xFFFFFFFF,
    }


def device_of(local_rank: int) -> torch.device:
    """This process's GPU.

    Raises:
        UnsupportedError: there is none.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("no CUDA GPU on this machine: use --world host, or a machine with a GPU.")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context, for seconds: before ranks begin to wait for each other
    return device
