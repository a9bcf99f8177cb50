# SPDX-License-Identifier: Apache-2.0
"""Compiling and launching the fused kernels of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nvcomm import jit
from nvcomm.collectives.all_reduce import Launcher, ReduceProtocol, choose
from nvcomm.collectives.all_reduce_mhc_checks import BoundaryTensors, ExpertTensors
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig, MhcPart, MhcShape, PublishTarget
from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
from nvcomm.collectives.mailbox_kernel import load
from nvcomm.env import settings
from nvcomm.errors import UsageError
from nvcomm.handle import Handle
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Options, Pdl

# World size -> bytes of x from which two-shot is the faster one: from one row on where ranks are more than two
# (docs/results/all_reduce.md).
MHC_SWITCH_BYTES = {1: 1 << 31, 2: 1 << 31, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0, 8: 0}

# Of the CTAs that a device could hold, the fraction that it holds where they come in clusters. An H200 holds 94 of 5
# CTAs, four a multiprocessor (0.89; 0.89 to 0.94 for clusters of 3 to 8), and fewer where other CTAs lie between.
_CLUSTERS_FIT = 0.85

# With an early trigger a rank may launch half of the clusters that it may launch without (R8), so that many rows take
# them several rounds. From so many on, a plain launch of all clusters is faster, and sooner for a rank that has its GPU
# alone (docs/results/all_reduce.md).
PLAIN_FROM_ROUNDS_ALONE = 2
PLAIN_FROM_ROUNDS_SHARED = 5

# Parts that are all of a boundary; the others are its halves.
_WHOLE: tuple[MhcPart, ...] = ("fused", "finalize")


class MhcKernel(NamedTuple):
    """Which of a boundary's kernels.

    Attributes:
        part: what it does.
        two_shot: by which protocol.
        pdl: how it follows the kernel before it.
    """

    part: MhcPart
    two_shot: bool
    pdl: Pdl


def kernels_of(parts: tuple[MhcPart, ...], pdl: Pdl) -> list[MhcKernel]:
    """Every kernel that `parts` may launch on a communicator of this `pdl`."""
    edges: tuple[Pdl, ...] = ("early", "off") if pdl == "early" else (pdl,)
    whole = [
        MhcKernel(part, two_shot, each)
        for part in parts
        if part in _WHOLE
        for two_shot in (False, True)
        for each in edges
    ]
    return whole + [MhcKernel(part, False, pdl) for part in parts if part not in _WHOLE]


def kernel_config(
    shape: MhcShape, kernel: MhcKernel, layout: MailboxLayout, options: Options, *, multicast: bool
) -> MhcConfig:
    """What a rank compiles a kernel for, here or ahead of time (`nvcomm compile`)."""
    return MhcConfig(
        layout, shape, kernel.part, kernel.two_shot, multicast, kernel.pdl, options.protocol != "copy",
        device_checks=settings().device_checks > 0, delayed=options.transport == "delayed",
    )  # fmt: skip


class MhcLauncher:
    """The fused kernels of one rank for one shape."""

    def __init__(
        self, shape: MhcShape, parts: tuple[MhcPart, ...], layout: MailboxLayout, options: Options,
        handle: Handle, *, places: Callable[[int], int], alone: bool, multicast: bool, launcher: Launcher,
    ) -> None:  # fmt: skip
        """Compiles and loads the kernels of `parts`; waits for the device (R9).

        Args:
            shape: the model's sizes.
            parts: what will be called.
            layout: the mailbox.
            options: the communicator's.
            handle: the rank's.
            places: CTAs a rank may launch (R8) of a kernel of which so many fit one multiprocessor.
            alone: whether every rank of the communicator has a GPU of its own.
            multicast: whether there is a multicast pointer.
            launcher: how the engine launches.

        Raises:
            UsageError: not one cluster of a row's CTAs may be resident.
        """
        self.shape = shape
        self._layout = layout
        self._options = options
        self._handle = handle
        self._multicast = multicast
        self._plain_from_rounds = PLAIN_FROM_ROUNDS_ALONE if alone else PLAIN_FROM_ROUNDS_SHARED
        self._launcher = launcher
        config = MhcConfig(layout, shape)
        self._max_clusters = int(places(config.ctas_per_sm) * (_CLUSTERS_FIT if config.cluster > 1 else 1))
        self._max_clusters //= config.cluster
        # an early trigger has already been counted as a second grid
        self._max_half_clusters = self._max_clusters // (2 if options.pdl == "safe" else 1)
        if self._max_clusters == 0 or (self._max_half_clusters == 0 and "collect" in parts):
            raise UsageError(
                f"a row of {shape.hidden} takes {config.cluster} CTAs, and this rank may hold fewer: raise "
                "device_share, use fewer ranks a GPU, or pdl='safe'."
            )
        self._kernels: dict[MhcKernel, jit.CompiledKernel] = {}
        for kernel in kernels_of(parts, options.pdl):
            config = kernel_config(shape, kernel, layout, options, multicast=multicast)
            self._kernels[kernel] = load(AllReduceMhcKernel(config))

    def fused(self, x: torch.Tensor, tensors: BoundaryTensors, protocol: ReduceProtocol) -> None:
        """All of it, from a contribution."""
        self._launch("fused", protocol, tensors.residual.shape[0], (x.data_ptr(), 0, 0, 0), tensors)

    def finalize(self, experts: ExpertTensors, tensors: BoundaryTensors, protocol: ReduceProtocol) -> None:
        """All of it, from a MoE output in expert order."""
        sources = (experts.experts, experts.weights, experts.indices, experts.shared)
        pointers = tuple(0 if one is None else one.data_ptr() for one in sources)
        self._launch("finalize", protocol, tensors.residual.shape[0], pointers, tensors)

    def publish(self, x: torch.Tensor) -> None:
        """The first half: publishes a contribution by LL, and waits for nobody."""
        self._launch("publish", "ll", x.shape[0], (x.data_ptr(), 0, 0, 0), None)

    def collect(self, tensors: BoundaryTensors) -> None:
        """The second half, after `publish` or a kernel that published to `target()`."""
        self._launch("collect", "ll", tensors.residual.shape[0], (0, 0, 0, 0), tensors)

    def target(self) -> PublishTarget:
        """Where a kernel has to store a contribution."""
        peers, multicast_ptr, state, _, _, rank = self._handle
        return PublishTarget.of(self._layout, self.shape, rank, tuple(peers), multicast_ptr, state)

    def _launch(
        self, part: MhcPart, protocol: ReduceProtocol, rows: int, sources: tuple[int, ...],
        tensors: BoundaryTensors | None,
    ) -> None:  # fmt: skip
        two_shot = (
            choose(protocol, rows * self.shape.row_bytes, self._layout.world_size, MHC_SWITCH_BYTES) == "two_shot"
        )
        most, pdl = self._grid(part, rows)
        kernel = self._kernels.get(MhcKernel(part, two_shot, pdl))
        if kernel is None:
            raise UsageError(
                f"the kernels of {part!r} are not loaded: build this operation with parts=({part!r}, ...)."
            )
        pointers: tuple[int, ...] = (0,) * 7
        eps = 0.0
        if tensors is not None:
            named = (
                tensors.residual, tensors.post, tensors.comb, tensors.pre, tensors.norm_weight, tensors.new_residual,
                tensors.h,
            )  # fmt: skip
            pointers = tuple(0 if one is None else one.data_ptr() for one in named)
            eps = tensors.eps
        operation = "all_reduce_mhc two_shot" if two_shot else "all_reduce_mhc ll"
        self._launcher(operation, torch.bfloat16, kernel, (*sources, *pointers, eps, rows), min(most, rows))

    def _grid(self, part: MhcPart, rows: int) -> tuple[int, Pdl]:
        """Clusters that may be launched (R8), and how.

        A plain launch begins when everything before it in its stream has ended, and triggers nobody: no other grid
        of the rank is resident with it. So it may hold what an early trigger keeps for the next one.
        """
        pdl = self._options.pdl
        if part not in _WHOLE:  # beside a collect kernel the publish kernel before it may be resident
            return self._max_half_clusters, pdl
        if pdl == "early" and rows > (self._plain_from_rounds - 1) * self._max_clusters:
            return 2 * self._max_clusters, "off"
        return self._max_clusters, pdl
