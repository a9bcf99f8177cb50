# SPDX-License-Identifier: Apache-2.0
"""Which device and which engine a communicator gets, and whether one process drives all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from nvcomm.capability import vote
from nvcomm.errors import CapabilityError, NvcommError, UnsupportedError, UsageError
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

    tag: int

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


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index; the current GPU, or the CPU, where None."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"device is {device!r}; wanted a torch.device, a text such as 'cuda:0' or 'cpu', or a GPU's number."
        ) from error
    if target.type not in ("cuda", "cpu"):
        raise UsageError(f"device is {target}; wanted: a CUDA device or the CPU.")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device is {target}, and PyTorch finds no CUDA GPU here: take device='cpu', or see `nvcomm doctor`."
        )
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return target


def device_of_all(group: Group, device: torch.device | str | int | None, timeout_s: float) -> torch.device:
    """This rank's device, once every rank has one and all are of one kind. Collective; errors as of `Communicator`."""
    found: list[torch.device] = []

    def attempt() -> str:
        found.append(resolve_device(device))
        if found[0].type == "cuda":
            _gpu_worlds()  # a rank that has no compiler says so here, to all
        return found[0].type

    kinds = vote(group, "nvcomm.device", attempt, timeout_s)
    if len(set(kinds)) > 1:
        reasons = {rank: [f"device={kind}"] for rank, kind in enumerate(kinds)}
        listed = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise CapabilityError(f"ranks have devices of different kinds: {listed}. Give all GPUs, or none.", reasons)
    return found[0]


def build_rank(group: Group, device: torch.device, options: Options) -> Engine:
    """One rank of a world of processes. Collective; see `Communicator`."""
    check_world_size(group.world_size)
    if device.type == "cuda":
        return cast("Engine", _gpu_worlds().build_peer(group, device, options))
    from nvcomm.host.world import build_rank as build_host

    return build_host(group, options, **_host_options(options))


def build_world(world_size: int, device: torch.device, options: Options) -> World:
    """All ranks in this process; see `nvcomm.virtual.VirtualWorld`."""
    check_world_size(world_size)
    if device.type == "cuda":
        return cast("World", _gpu_worlds().CudaWorld(world_size, device, options))
    from nvcomm.host.world import ThreadWorld

    return ThreadWorld(world_size, options, **_host_options(options))


def _gpu_worlds() -> ModuleType:
    """`nvcomm.collectives.world`, which needs the compiler of kernels."""
    try:
        return importlib.import_module("nvcomm.collectives.world")
    except ImportError as error:
        raise UnsupportedError(
            f"GPU tensors need the CuTe DSL, which cannot be imported here ({error}): pip install 'nvcomm[cu13]', or "
            "take device='cpu'."
        ) from error


def _host_options(options: Options) -> dict[str, Any]:
    if options.transport == "multicast":
        raise UnsupportedError("transport='multicast' needs GPUs; the host world has 'peer' and 'delayed'.")
    if options.protocol == "copy":
        raise UnsupportedError("protocol='copy' needs GPUs; the host world has 'mailbox' and 'late-copy'.")
    return {
        "mutations": frozenset() if options.protocol == "mailbox" else frozenset({options.protocol}),
        "transport": "delayed" if options.transport == "delayed" else "direct",
        "seed": options.seed,
    }
