# SPDX-License-Identifier: Apache-2.0
"""Worlds of CPU ranks for `Communicator` and `virtual_world`: a process per rank, or a thread per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from nvcomm.env import settings
from nvcomm.errors import PeerTimeoutError
from nvcomm.group import Group, as_group
from nvcomm.host.connect import local_engines, open_memory
from nvcomm.host.engine import HostEngine

Rank = TypeVar("Rank")


class HostOptions(Protocol):
    """What a communicator's caller chose, as far as it concerns CPU ranks."""

    @property
    def max_bytes(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def generation(self) -> int: ...

    @property
    def protocol(self) -> str: ...

    @property
    def transport(self) -> str: ...


def build_rank(group: Group | dist.ProcessGroup | None, options: HostOptions, **engine_options: Any) -> HostEngine:
    """One rank of a world of processes; its `close()` gives the memory back. Collective.

    Args:
        group: see `nvcomm.group.as_group`.
        options: of the communicator.
        **engine_options: `transport`, `seed` and `mutations` of `HostEngine`, for tests and stress.

    Raises:
        CapabilityError, GroupError, UsageError, UnsupportedError: see `open_memory` and `HostEngine`.
    """
    ranks = as_group(group, options.timeout_s)
    config = {"generation": options.generation, "protocol": options.protocol, "transport": options.transport}
    memory, layout = open_memory(ranks, options.max_bytes, options.timeout_s, config)
    try:
        return HostEngine(
            memory,
            layout,
            ranks,
            timeout_s=options.timeout_s,
            generation=options.generation,
            device_checks=settings().device_checks,
            owns_memory=True,
            **engine_options,
        )
    except BaseException:
        memory.close()
        raise


class ThreadWorld:
    """All ranks in this process, each with a thread of its own.

    Attributes:
        engines: rank r's at index r.
        streams: None for each rank: there are none on the CPU.
    """

    def __init__(self, world_size: int, options: HostOptions, **engine_options: Any) -> None:
        self.engines = local_engines(
            world_size,
            options.max_bytes,
            timeout_s=options.timeout_s,
            generation=options.generation,
            device_checks=settings().device_checks,
            **engine_options,
        )
        self.streams = (None,) * world_size
        self._threads = [ThreadPoolExecutor(1, f"nvcomm-rank-{rank}") for rank in range(world_size)]

    def run(self, ranks: Sequence[Rank], call: Callable[[Rank], Any]) -> None:
        """Calls `call(ranks[r])` on rank r's thread, all at once, and waits for all.

        Raises:
            Whatever a rank raised; where several did, rather the cause than a PeerTimeoutError that followed from it.
        """
        # Both are per thread in torch, and the caller's must hold.
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def work(rank: Rank) -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
                call(rank)

        futures = [thread.submit(work, rank) for thread, rank in zip(self._threads, ranks, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerTimeoutError))

    def reset(self) -> None:
        """Brings every rank back; see `HostEngine.reset`."""
        self.run(self.engines, HostEngine.reset)

    def close(self) -> None:
        """Closes every engine and ends the threads."""
        for engine in self.engines:
            engine.close()
        for thread in self._threads:
            thread.shutdown()
