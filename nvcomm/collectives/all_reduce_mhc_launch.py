# SPDX-License-Identifier: Apache-2.0
"""Compiling and launching the fused kernels of one rank."""

from __future__ import annotations

from collections.abc import Callable

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
from nvcomm.options import Options

# Of the CTAs that a device could hold, the fraction that it holds where they come in clusters: a cluster lies within
# one GPC, whose last places may be too few for one. Measured: 0.90 at two CTAs a multiprocessor, clusters of 5 (H200).
_CLUSTERS_FIT = 0.85

# World size -> bytes of x from which two-shot is the faster one: from one row on where ranks are more than two
# (docs/results/all_reduce.md).
MHC_SWITCH_BYTES = {1: 1 << 31, 2: 1 << 31, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0, 8: 0}


def kernels_of(parts: tuple[MhcPart, ...]) -> list[tuple[MhcPart, bool]]:
    """(part, whether it is two-shot) of every kernel that `parts` may launch."""
    return [
        (part, two_shot)
        for part in parts
        for two_shot in ((False, True) if part in ("fused", "finalize") else (False,))
    ]


def kernel_config(
    shape: MhcShape, part: MhcPart, layout: MailboxLayout, options: Options, *, two_shot: bool, multicast: bool
) -> MhcConfig:
    """What a rank compiles the kernel of `part` for, here or ahead of time (`nvcomm compile`)."""
    return MhcConfig(
        layout, shape, part, two_shot, multicast, options.pdl, options.protocol != "copy",
        device_checks=settings().device_checks > 0, delayed=options.transport == "delayed",
    )  # fmt: skip


class MhcLauncher:
    """The fused kernels of one rank for one shape."""

    def __init__(
        self, shape: MhcShape, parts: tuple[MhcPart, ...], layout: MailboxLayout, options: Options,
        handle: Handle, *, places: Callable[[int], int], multicast: bool, launcher: Launcher,
    ) -> None:  # fmt: skip
        """Compiles and loads the kernels of `parts`; waits for the device (R9).

        Args:
            shape: the model's sizes.
            parts: what will be called.
            layout: the mailbox.
            options: the communicator's.
            handle: the rank's.
            places: CTAs a rank may launch (R8) of a kernel of which so many fit one multiprocessor.
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
        self._launcher = launcher
        config = kernel_config(shape, "fused", layout, options, two_shot=False, multicast=multicast)
        self._max_clusters = int(places(config.ctas_per_sm) * (_CLUSTERS_FIT if config.cluster > 1 else 1))
        self._max_clusters //= config.cluster
        # an early trigger has already been counted as a second grid
        self._max_half_clusters = self._max_clusters // (2 if options.pdl == "safe" else 1)
        if self._max_clusters == 0 or (self._max_half_clusters == 0 and "collect" in parts):
            raise UsageError(
                f"a row of {shape.hidden} takes {config.cluster} CTAs, and this rank may hold fewer: raise "
                "device_share, use fewer ranks a GPU, or pdl='safe'."
            )
        self._kernels: dict[tuple[MhcPart, bool], jit.CompiledKernel] = {}
        for part, two_shot in kernels_of(parts):
            config = kernel_config(shape, part, layout, options, two_shot=two_shot, multicast=multicast)
            self._kernels[part, two_shot] = load(AllReduceMhcKernel(config))

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
        kernel = self._kernels.get((part, two_shot))
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
        # beside a collect kernel the publish kernel before it may still be resident (R8)
        most = self._max_clusters if part in ("fused", "finalize") else self._max_half_clusters
        clusters = min(most, rows)
        operation = "all_reduce_mhc two_shot" if two_shot else "all_reduce_mhc ll"
        self._launcher(operation, torch.bfloat16, kernel, (*sources, *pointers, eps, rows), clusters)
