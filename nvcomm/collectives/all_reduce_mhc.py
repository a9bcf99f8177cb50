# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary as one operation of a communicator: checks, outputs, and the pairing of its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nvcomm.collectives.all_reduce_mhc_checks import (
    BoundaryArguments,
    BoundaryTensors,
    ExpertTensors,
    check_boundary,
    check_contribution,
    check_experts,
)
from nvcomm.errors import UsageError
from nvcomm.options import is_count

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceProtocol
    from nvcomm.collectives.all_reduce_mhc_config import MhcPart, MhcShape, PublishTarget
    from nvcomm.communicator import Communicator


class Boundary(Protocol):
    """What works on checked tensors: `MhcLauncher` on a GPU, its counterpart in `nvcomm.host` on CPUs."""

    def fused(self, x: torch.Tensor, tensors: BoundaryTensors, protocol: ReduceProtocol) -> None: ...

    def finalize(self, experts: ExpertTensors, tensors: BoundaryTensors, protocol: ReduceProtocol) -> None: ...

    def publish(self, x: torch.Tensor) -> None: ...

    def collect(self, tensors: BoundaryTensors) -> None: ...

    def target(self) -> PublishTarget: ...


@dataclass(frozen=True, slots=True)
class _Published:
    """A first half that waits for its second, for a communicator to remember: a reset forgets it there."""

    boundary: AllReduceMhc
    rows: int

    def __str__(self) -> str:
        return "all_reduce_mhc.collect"


Results = tuple[torch.Tensor, torch.Tensor | None]


class AllReduceMhc:
    """All-reduce, mHC post-mix of the residual streams, collapse and RMSNorm, for one shape.

    `Communicator.mhc` builds it. Bits are those of `nvcomm.reference.collectives.all_reduce_mhc` on every rank and for
    both protocols; h may differ from it by one unit in the last place of bf16, but not between ranks.

    Example:
        >>> boundary = comm.mhc(hidden=5120)
        >>> residual, h = boundary(x, residual, post, comb, pre, norm_weight, 1e-20)
    """

    def __init__(self, comm: Communicator, shape: MhcShape, parts: tuple[MhcPart, ...], launcher: Boundary) -> None:
        """Used by `Communicator.mhc`."""
        self.comm = comm
        self.shape = shape
        self._parts = parts
        self._launcher = launcher

    @property
    def max_rows(self) -> int:
        """Most rows of a call: those that fit the communicator's `max_bytes`."""
        return self.comm.max_bytes // self.shape.row_bytes

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        *,
        new_residual: torch.Tensor | None = None,
        h: torch.Tensor | None = None,
        protocol: ReduceProtocol = "auto",
    ) -> Results:
        """One boundary.

        Args:
            x: (rows, hidden) bf16, this rank's contribution; as all tensors contiguous, 16-byte aligned and on the
                communicator's device.
            residual: (rows, hc, hidden) bf16, the same on every rank, as all that follows.
            post: (rows, hc) fp32.
            comb: (rows, hc, hc) fp32, source stream first.
            pre: (rows, hc) fp32, or None: no collapse and no norm.
            norm_weight: (hidden,) bf16; written by no kernel of the same step, for it is read ahead of them. None
                where `pre` is.
            eps: added to the mean square.
            new_residual: like `residual`, and either `residual` itself or apart from all inputs; default: a new tensor.
            h: like `x`, apart from all inputs; default: a new tensor.
            protocol: see `Communicator.all_reduce`.

        Returns:
            The new residual streams, and the next sublayer's normed input or None.

        Raises:
            UsageError: an argument or the communicator's state is wrong; nothing was launched.
            PeerTimeoutError: an earlier call timed out (CUDA), or this one did (CPU).

        Ordering:
            As `Communicator.all_gather`.
        """
        self._check_built("fused")
        check_contribution(x, self.shape, self.comm)
        given = BoundaryArguments(residual, post, comb, pre, norm_weight, eps, new_residual, h)
        tensors = check_boundary(self.shape, self.comm, x.shape[0], given, x)
        self.comm.begin("all_reduce_mhc")
        if x.shape[0]:
            self._launcher.fused(x, tensors, protocol)
        return tensors.new_residual, tensors.h

    def finalize(
        self,
        experts: torch.Tensor,
        expert_weights: torch.Tensor,
        expert_indices: torch.Tensor,
        shared: torch.Tensor | None,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        *,
        new_residual: torch.Tensor | None = None,
        h: torch.Tensor | None = None,
        protocol: ReduceProtocol = "auto",
    ) -> Results:
        """One boundary behind a MoE whose output still lies in expert order.

        Args:
            experts: (expert rows, hidden) bf16.
            expert_weights: (rows, top_k) fp32.
            expert_indices: (rows, top_k) int32, rows of `experts`; -1: this rank does not hold the expert. Checked on
                the CPU alone: on a GPU another number reads memory that is not of `experts`.
            shared: (rows, hidden) bf16, the shared expert's output, or None.
            residual, post, comb, pre, norm_weight, eps, new_residual, h, protocol: as for a call.

        Returns, Raises, Ordering:
            As a call.
        """
        sources = check_experts(self.shape, self.comm, experts, expert_weights, expert_indices, shared)
        self._check_built("finalize")
        rows = expert_indices.shape[0]
        given = BoundaryArguments(residual, post, comb, pre, norm_weight, eps, new_residual, h)
        read = (sources.experts, sources.weights, sources.indices, sources.shared)
        tensors = check_boundary(self.shape, self.comm, rows, given, *read)
        self.comm.begin("all_reduce_mhc.finalize")
        if rows:
            self._launcher.finalize(sources, tensors, protocol)
        return tensors.new_residual, tensors.h

    def publish_target(self, rows: int) -> PublishTarget:
        """Where another kernel publishes `rows` rows itself; launch it next, on this stream, and then `collect`."""
        self._check_built("collect")
        if not is_count(rows, 1, self.max_rows):
            raise UsageError(f"publish_target: got {rows!r} rows; wanted 1 to {self.max_rows}.")
        target = self._launcher.target()  # before anything waits for `collect`: a CPU rank has none
        self.comm.begin("all_reduce_mhc.publish_target", pending=_Published(self, rows))
        return target

    def publish(self, x: torch.Tensor) -> None:
        """The first half of a call: publishes `x` (rows, hidden) bf16, waits for nobody. `collect` has to be next."""
        self._check_built("publish", "collect")
        check_contribution(x, self.shape, self.comm)
        if not x.shape[0]:
            raise UsageError("publish: got 0 rows; a call without rows has no halves.")
        self.comm.begin("all_reduce_mhc.publish", pending=_Published(self, x.shape[0]))
        try:
            self._launcher.publish(x)
        except UsageError:  # nothing was published
            self.comm.forget_pending()
            raise

    def collect(
        self,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        *,
        new_residual: torch.Tensor | None = None,
        h: torch.Tensor | None = None,
    ) -> Results:
        """The second half of a call, of as many rows as were published.

        What it reads must have been written before the kernel that published, not by it: it is read ahead of that
        kernel's end (docs/mailbox.md R1 i).

        Args:
            residual, post, comb, pre, norm_weight, eps, new_residual, h: as for a call.

        Raises:
            UsageError: nothing was published, or other rows.
        """
        published = self.comm.pending
        if not isinstance(published, _Published):
            raise UsageError("collect: nothing was published; call publish or publish_target first.")
        if published.boundary is not self:
            raise UsageError("collect: what was published is another boundary's: call that one's collect.")
        given = BoundaryArguments(residual, post, comb, pre, norm_weight, eps, new_residual, h)
        tensors = check_boundary(self.shape, self.comm, published.rows, given)
        self.comm.begin("all_reduce_mhc.collect", completes=True)
        try:
            self._launcher.collect(tensors)
        except UsageError:  # nothing was collected
            self.comm.begin("all_reduce_mhc.collect", pending=published, completes=True)
            raise
        return tensors.new_residual, tensors.h

    def _check_built(self, *parts: MhcPart) -> None:
        """Raises UsageError unless `mhc` was asked for `parts`: a half that cannot be followed is not begun."""
        missing = [part for part in parts if part not in self._parts]
        if missing:
            raise UsageError(
                f"all_reduce_mhc: {' and '.join(map(repr, missing))} was not built: call mhc() with "
                f"parts={(*self._parts, *missing)!r} on every rank."
            )
