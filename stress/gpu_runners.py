# SPDX-License-Identifier: Apache-2.0
"""The worlds on GPUs: all ranks in this process (`virtual`), or this process's rank among others (`peer`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import nvcomm
from nvcomm import group as groups
from nvcomm.errors import UnsupportedError, UsageError
from stress.plan import MAX_BYTES
from stress.processes import MEET_S, Alone, Others
from stress.replay_gpu import OnHang, replay
from stress.run import FIRST_GENERATION, Outcome, Progress, RunConfig


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
