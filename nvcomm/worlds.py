# SPDX-License-Identifier: Apache-2.0
"""Which engine a communicator gets: by the device, and by whether one process drives all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nvcomm.errors import NvcommError, UnsupportedError
from nvcomm.group import Group
from nvcomm.options import Options, check_world_size
from nvcomm.stats import Audit, Stats

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp, ReduceProtocol
    from nvcomm.collectives.all_reduce_mhc import Boundary
    from nvcomm.collectives.all_reduce_mhc_config import MhcPart, MhcShape
    from nvcomm.communicator import Communicator


class Engine(Protocol):
    """What works on one rank's mailbox: `nvcomm.host` for CPU tensors, `nvcomm.collectives` for CUDA tensors."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def ready(self, op: ReduceOp, dtype: torch.dtype) -> bool: ...

    def prepare(self, op: ReduceOp, dtype: torch.dtype) -> None: ...

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, protocol: ReduceProtocol) -> None: ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def mhc(self, shape: MhcShape, parts: tuple[MhcPart, ...]) -> Boundary: ...

    def serving(self) -> AbstractContextManager[None]: ...

    def fault(self) -> NvcommError | None: ...

    def stats(self) -> Stats: ...

    def audit(self) -> Audit: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class World(Protocol):
    """All ranks in one process."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    @property
    def streams(self) -> Sequence[torch.cuda.Stream | None]: ...

    def run(self, ranks: Sequence[Communicator], call: Callable[[Communicator], Any]) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def build_rank(group: Group, device: torch.device, options: Options) -> Engine:
    """One rank of a world of processes. Collective; see `Communicator`."""
    check_world_size(group.world_size)
    if device.type == "cuda":
        from nvcomm.collectives.world import build_peer

        return build_peer(group, device, options)
    from nvcomm.host.world import build_rank as build_host

    return build_host(group, options, **_host_options(options))


def build_world(world_size: int, device: torch.device, options: Options) -> World:
    """All ranks in this process; see `nvcomm.virtual.VirtualWorld`."""
    check_world_size(world_size)
    if device.type == "cuda":
        from nvcomm.collectives.world import CudaWorld

        return CudaWorld(world_size, device, options)
    from nvcomm.host.world import ThreadWorld

    return ThreadWorld(world_size, options, **_host_options(options))


def _host_options(options: Options) -> dict[str, Any]:
    if options.transport == "multicast":
        raise UnsupportedError("transport='multicast' needs GPUs; the host world has 'peer' and 'delayed'.")
    return {
        "mutations": frozenset() if options.protocol == "mailbox" else frozenset({options.protocol}),
        "transport": "delayed" if options.transport == "delayed" else "direct",
        "seed": options.seed,
    }
