# SPDX-License-Identifier: Apache-2.0
"""Replays on GPUs: all ranks in this process (`virtual`), or this process's rank among others (`peer`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import nvcomm
from nvcomm import group as groups
from nvcomm.env import multicast_disabled_by
from nvcomm.errors import GroupError, PeerTimeoutError, UnsupportedError, UsageError
from nvcomm.options import Options
from stress.audit import compare_audits
from stress.decode import BadWord, Origin, decode
from stress.drive import Driver
from stress.gpu_rank import GpuRank
from stress.hang import Hang, Position, Wait
from stress.ledger import LedgerReading
from stress.plan import MAX_BYTES, SMALL_BYTES, Plan, PlanConfig, shape_for
from stress.run import Outcome, Progress, RunConfig
from stress.watchdog import GRACE_S, Watchdog

REPLAYS_PER_GRAPH = 8
NUM_SMALL, NUM_BIG = 96, 8
# A control needs changing sizes and no more: few graphs, quickly captured.
CONTROL_SMALL = 24

OnHang = Callable[[RunConfig, Hang], None]


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
        timeout_s: bound of the rendezvous.
    """

    def __init__(self, device: torch.device, on_hang: OnHang, timeout_s: float) -> None:
        self._device = device
        self._on_hang = on_hang
        self._timeout_s = timeout_s
        self.group = groups.from_environment()

    @property
    def reports(self) -> bool:
        """Rank 0 prints."""
        return self.group.rank == 0

    def run(self, config: RunConfig, progress: Progress) -> Outcome:
        """See `Runner.run`."""
        group = self.group
        if group.world_size != config.ranks:
            raise UsageError(f"--ranks {config.ranks} and {group.world_size} processes: leave --ranks out, or agree.")

        if config.transport == "peer":
            # The one switch there is; read when the memory is built, by this process alone.
            os.environ["NVCOMM_DISABLE_MULTICAST"] = "1"
        options = _world_options(config)
        with nvcomm.Communicator(group, self._device, max_bytes=MAX_BYTES, **options) as comm:
            multicast = comm.engine.multicast  # type: ignore[attr-defined]
            if config.transport == "multicast" and not multicast:
                raise UnsupportedError(
                    f"these ranks share no multicast memory ({multicast_disabled_by() or 'no NVSwitch between them'}): "
                    "use --transport peer; `nvcomm doctor` says more."
                )
            others = Others(group, config.timeout_s + GRACE_S)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            outcome = replay([comm], [stream], config, progress, self._on_hang, others)
            return dataclasses.replace(outcome, transport="multicast" if multicast else "peer")

    def close(self) -> None:
        """The group ends with the process."""


class Alone:
    """All ranks are here: nobody else has to be asked."""

    def agree(self, stop: bool) -> bool:
        """Whether to stop."""
        return stop

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every process's facts."""
        return [facts]


class Others:
    """The other processes of a peer world; every process calls the same, in the same order."""

    def __init__(self, group: groups.Group, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop."""
        return any(self._group.exchange("stress/stop", stop, self._timeout_s))

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every process's facts, by rank."""
        return self._group.exchange("stress/facts", facts, self._timeout_s)  # type: ignore[return-value]


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
        return Hang(reason, tuple(_waits(comms)), tuple(_positions(ranks)))

    def look(stop: bool) -> bool:
        for comm in comms:
            comm.check()
        return others.agree(stop)

    limit_s = config.timeout_s + GRACE_S
    with contextlib.ExitStack() as cleanup, Watchdog(limit_s, explain, lambda hang: on_hang(config, hang)) as watchdog:
        try:
            for comm, stream in zip(comms, streams, strict=True):
                ranks.append(GpuRank(comm, plan, comm.device, stream))
                cleanup.callback(ranks[-1].close)
                ranks[-1].load()
                watchdog.beat()
            progress.stage = "replays"
            launches, seconds = Driver(ranks, plan, watchdog, look).run(config, progress)
            _settle(ranks)
            for comm in comms:
                comm.check()
            facts = others.gather(_facts(comms, ranks, plan))
        except (PeerTimeoutError, GroupError) as error:  # GroupError: another process of the world left
            _settle(ranks)
            return _outcome_of_hang(explain(str(error)), ranks, plan)
    return _outcome(facts, config, launches * REPLAYS_PER_GRAPH, seconds)


def _facts(comms: Sequence[Any], ranks: Sequence[GpuRank], plan: Plan) -> dict[str, Any]:
    """What this process saw, as JSON."""
    readings = [rank.reading() for rank in ranks]
    firsts = [first for rank in ranks if (first := _first_bad(plan, rank.comm.rank, rank.reading()))]
    return {
        "replays": [reading.replay for reading in readings],
        "gathers": [reading.gathers for reading in readings],
        "bad_words": sum(reading.bad_words for reading in readings),
        "firsts": [first.as_json() for first in firsts],
        "audits": [dataclasses.asdict(comm.audit()) for comm in comms],
        "stats": [dataclasses.asdict(comm.stats()) for comm in comms],
    }


def _outcome(facts: list[dict[str, Any]], config: RunConfig, replays: int, seconds: float) -> Outcome:
    """Puts the processes' facts together: what every rank has done, and the earliest wrong word."""
    firsts = [BadWord.from_json(first) for fact in facts for first in fact["firsts"]]
    first = min(firsts, key=BadWord.order, default=None)
    done = min(count for fact in facts for count in fact["replays"])
    gathers = min(count for fact in facts for count in fact["gathers"])
    audit = list(compare_audits([audit for fact in facts for audit in fact["audits"]]))
    if done != replays:
        audit.append(f"launched {replays} replays, but a rank's ledger counts {done}")
    return Outcome(
        replays=done,
        gathers=gathers,
        bad_words=sum(fact["bad_words"] for fact in facts),
        first_bad=first,
        seconds=seconds,
        audit=tuple(audit),
        stats=tuple(stats for fact in facts for stats in fact["stats"]),
    )


def _settle(ranks: Sequence[GpuRank]) -> None:
    """Waits for what was launched, and reads the ledgers."""
    torch.cuda.synchronize()
    for rank in ranks:
        rank.snapshot()
    torch.cuda.synchronize()


def _outcome_of_hang(hang: Hang, ranks: Sequence[GpuRank], plan: Plan) -> Outcome:
    """What this process alone knows: the others may be gone."""
    readings = [rank.reading() for rank in ranks]
    firsts = [first for rank in ranks if (first := _first_bad(plan, rank.comm.rank, rank.reading()))]
    return Outcome(
        replays=min((reading.replay for reading in readings), default=0),
        gathers=min((reading.gathers for reading in readings), default=0),
        bad_words=sum(reading.bad_words for reading in readings),
        first_bad=min(firsts, key=BadWord.order, default=None),
        seconds=0.0,
        hang=hang,
    )


def _first_bad(plan: Plan, rank: int, reading: LedgerReading) -> BadWord | None:
    seen = reading.first
    if seen is None:
        return None
    expected = Origin(seen.src_rank, seen.gather, seen.replay, seen.index)
    return decode(plan.oracle, rank, expected, seen.seen, plan.row_words)


def _waits(comms: Sequence[Any]) -> Iterator[Wait]:
    for comm in comms:
        try:
            comm.check()
        except PeerTimeoutError as error:
            yield Wait.of(error)


def _positions(ranks: Sequence[GpuRank]) -> Iterator[Position]:
    """Where the ranks were when their ledgers were last read, in whole graphs."""
    for rank in ranks:
        reading = rank.reading()
        yield Position(rank.comm.rank, reading.replay, 0, "as of the last look")


def _world_options(config: RunConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"timeout_s": config.timeout_s, "pdl": config.pdl}
    if config.protocol != "mailbox":
        options["protocol"] = config.protocol
    if config.transport == "delayed":
        if "transport" not in {field.name for field in dataclasses.fields(Options)}:
            raise UnsupportedError("the delayed transport is not there in GPU worlds: use --world host.")
        options["transport"] = "delayed"
    return options


def device_of(local_rank: int) -> torch.device:
    """This process's GPU.

    Raises:
        UnsupportedError: there is none.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("no CUDA GPU on this machine: use --world host, or a machine with a GPU.")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
