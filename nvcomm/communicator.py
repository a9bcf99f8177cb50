# SPDX-License-Identifier: Apache-2.0
"""The communicator: one rank's end of a group, its mailbox and its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from nvcomm import log
from nvcomm.arguments import check_input, check_output, part_shape
from nvcomm.collectives.all_reduce_mhc_checks import sizes_of
from nvcomm.engine_owner import EngineOwner
from nvcomm.env import settings
from nvcomm.errors import UsageError
from nvcomm.group import as_group
from nvcomm.options import DEFAULT_MAX_BYTES, Options, Pdl, Protocol, Transport
from nvcomm.worlds import Engine, build_rank, device_of_all

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp, ReduceProtocol
    from nvcomm.collectives.all_reduce_mhc import AllReduceMhc
    from nvcomm.collectives.all_reduce_mhc_config import MhcPart


class Communicator(EngineOwner):
    """One rank's end of a group.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        device: where its tensors live.
        max_bytes: most bytes a rank contributes to a call.
        pending: the second half that has to be next, see `begin`; else None.
        stream: in a virtual world on a GPU, the rank's own stream; else None: calls go to the current stream.

    Collective: every rank of the group constructs it, and makes the same calls on it in the same order (R7). Use one
    communicator for each stream that shall run at the same time as others.

    Example:
        >>> comm = nvcomm.Communicator(dist.group.WORLD, "cuda")
        >>> y = comm.all_gather(x)  # (world_size, *x.shape)
    """

    # (hidden, streams) -> the first boundary that was built for it
    _boundaries: dict[tuple[int, int], AllReduceMhc]

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str | int | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        timeout_s: float | None = None,
        pdl: Pdl = "safe",
        device_share: float = 0.5,
        generation: int = 0,
        protocol: Protocol = "mailbox",
        transport: Transport = "auto",
        seed: int = 0,
    ) -> None:
        """Builds this rank's mailbox, finds the others', and loads every kernel. Collective, and blocking.

        Args:
            group: a torch process group, an mpi4py communicator, or an `nvcomm.group.Group`; default: torch's default
                group where there is one, else the ranks that torchrun or mpiexec started.
            device: this rank's device; default: the current GPU, or the CPU where there is none.
            max_bytes: see `nvcomm.options.Options`, as for all that follow.
            timeout_s: default: NVCOMM_TIMEOUT_S.
            pdl: how GPU kernels follow each other.
            device_share: fraction of the GPU that this communicator may hold.
            generation: where the count of collectives starts.
            protocol: others than "mailbox" are wrong on purpose.
            transport: how a publish reaches the others.
            seed: of the delayed transport.

        Raises:
            UsageError: bad arguments, or called while a CUDA graph is captured.
            CapabilityError: ranks disagree, or one cannot take part; the same text on every rank.
            GroupError: a rank did not answer in time.
            UnsupportedError: this machine cannot do it.
        """
        timeout_s = settings().timeout_s if timeout_s is None else timeout_s
        options = Options(max_bytes, timeout_s, pdl, device_share, generation, protocol, transport, seed)
        ranks = as_group(group, timeout_s)
        log.configure(ranks.rank)
        target = device_of_all(ranks, device, timeout_s)
        super().__init__(build_rank(ranks, target, options), target, max_bytes)
        self._boundaries = {}

    @classmethod
    def from_engine(
        cls, engine: Engine, device: torch.device, max_bytes: int, stream: torch.cuda.Stream | None = None
    ) -> Self:
        """A communicator over an engine that exists already, with a stream of its own (virtual worlds)."""
        comm = cls.__new__(cls)
        EngineOwner.__init__(comm, engine, device, max_bytes, stream)
        comm._boundaries = {}
        return comm

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's `x`, bit for bit, in rank order.

        Args:
            x: (*shape) any dtype, contiguous, on this communicator's device; the same bytes on every rank, from 0 to
                `max_bytes`.
            out: (world_size, *shape), contiguous, apart from `x`; default: a new tensor.

        Returns:
            `out`: (world_size, *shape), the dtype of `x`.

        Raises:
            UsageError: an argument or the communicator's state is wrong; nothing was launched.
            PeerTimeoutError: an earlier call timed out (CUDA), or this one did (CPU).

        Ordering:
            CUDA: on the current stream, not blocking, can be captured. Outside capture a call from another stream
            runs behind the last one. CPU: returns when the result is there.
        """
        engine = self.engine
        check_input(x, self.device, self.max_bytes, "all_gather")
        shape = (self.world_size, *x.shape)
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        else:
            check_output(out, x, shape, "all_gather")
        self.begin("all_gather")
        if x.nbytes:
            engine.all_gather(x.detach(), out.detach())
        return out

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, protocol: ReduceProtocol = "auto"
    ) -> torch.Tensor:
        """The sum of every rank's `x`: the same bits on every rank, for both protocols and any number of rows.

        FP32 additions in one fixed order over the ranks, then one rounding (docs/mailbox.md R13). Infinities,
        subnormals and -0.0 are summed like any value; a NaN stays a NaN, of other bits perhaps.

        Args:
            x: (*shape) bf16, fp16 or fp32, contiguous, on this communicator's device; the same shape and dtype on
                every rank, from 0 to `max_bytes`.
            out: like `x`, apart from it; default: a new tensor.
            protocol: "ll" waits once and moves more, "two_shot" waits twice and moves less; "auto" takes the faster one
                by size.

        Returns:
            `out`: (*shape), the dtype of `x`.

        Raises:
            UsageError: an argument or the communicator's state is wrong, or kernels would have to be loaded where that
                cannot be done (see `prepare`); nothing was launched.
            PeerTimeoutError: an earlier call timed out (CUDA), or this one did (CPU).

        Ordering:
            As `all_gather`.
        """
        engine = self.engine
        check_input(x, self.device, self.max_bytes, "all_reduce")
        if out is None:
            out = torch.empty_like(x)
        else:
            check_output(out, x, tuple(x.shape), "all_reduce")
        self._make_ready("all_reduce", x.dtype)
        self.begin("all_reduce")
        if x.nbytes:
            engine.all_reduce(x.detach(), out.detach(), protocol)
        return out

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the sum of every rank's `x`, split by rows; bits as for `all_reduce`.

        Args:
            x: (rows, *shape) bf16, fp16 or fp32, contiguous, on this communicator's device; the same shape and dtype
                on every rank, from 0 to `max_bytes`.
            out: (own rows, *shape), apart from `x`; default: a new tensor. The first `rows % world_size` ranks own one
                row more than the others, as in `torch.tensor_split`; a rank may own none.

        Returns:
            `out`: the dtype of `x`.

        Raises, Ordering:
            As `all_reduce`.
        """
        engine = self.engine
        check_input(x, self.device, self.max_bytes, "reduce_scatter")
        shape = part_shape(x, self.rank, self.world_size)
        if out is None:
            out = x.new_empty(shape)
        else:
            check_output(out, x, shape, "reduce_scatter")
        self._make_ready("reduce_scatter", x.dtype)
        self.begin("reduce_scatter")
        if x.nbytes:
            engine.reduce_scatter(x.detach(), out.detach())
        return out

    def prepare(self, op: ReduceOp, dtype: torch.dtype) -> None:
        """Compiles and loads what `op` needs for `dtype`, so that calls can be captured.

        A first call outside capture does it too, except in a virtual world on a GPU: a load waits for the device, where
        another rank of this process may already wait for this one (docs/mailbox.md R9).
        """
        self.engine.prepare(op, dtype)

    def mhc(
        self, hidden: int, *, num_streams: int = 4, top_k: int = 0, parts: Sequence[MhcPart] | None = None
    ) -> AllReduceMhc:
        """Builds the fused sublayer boundary for one shape: all-reduce, mHC post-mix, collapse, RMSNorm.

        Compiles and loads its kernels, and waits for the device: build it on every rank of a virtual world before any
        of them calls it, and before a capture (docs/mailbox.md R9).

        Args:
            hidden: values of a row, a multiple of 64.
            num_streams: residual streams.
            top_k: experts of a row, for `AllReduceMhc.finalize`; 0: none.
            parts: what will be called: "fused", "finalize", or "publish" and "collect"; default: "fused", and
                "finalize" with `top_k`.

        Raises:
            UsageError: no kernel takes this shape or these parts, or called while a CUDA graph is captured.
        """
        from nvcomm.collectives.all_reduce_mhc import AllReduceMhc
        from nvcomm.collectives.all_reduce_mhc_config import MhcShape

        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError("mhc: kernels cannot be loaded while a CUDA graph is captured: build it before.")
        shape = MhcShape(hidden, num_streams, top_k)
        usual: tuple[MhcPart, ...] = ("fused", "finalize") if top_k else ("fused",)
        built = usual if parts is None else tuple(parts)
        boundary = AllReduceMhc(self, shape, built, self.engine.mhc(shape, built))
        if "fused" in built:
            self._boundaries.setdefault((hidden, num_streams), boundary)
        return boundary

    def all_reduce_mhc(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        pre: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        *,
        protocol: ReduceProtocol = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One sublayer boundary of new tensors, `mhc` being called for a shape that was not built before.

        See `AllReduceMhc.__call__`, which also takes outputs, for arguments, results, errors and ordering.
        """
        key = sizes_of(residual)
        if key not in self._boundaries:
            if self.engine and self.stream is not None:
                raise UsageError(
                    "all_reduce_mhc: its kernels cannot be loaded in a virtual world, where another rank of this "
                    f"process may already wait for this one: call mhc({key[0]}, num_streams={key[1]}) on every rank "
                    "first."
                )
            self.mhc(key[0], num_streams=key[1])
        return self._boundaries[key](x, residual, post, comb, pre, norm_weight, eps, protocol=protocol)

    def close(self) -> None:
        """Gives everything back. Local; on every rank, once no call is under way and no graph of its calls will run."""
        super().close()
        self._boundaries.clear()

    def _make_ready(self, op: ReduceOp, dtype: torch.dtype) -> None:
        engine = self.engine
        if engine.ready(op, dtype):
            return
        if self.device.type == "cuda" and (self.stream is not None or torch.cuda.is_current_stream_capturing()):
            raise UsageError(
                f"{op}: its kernels for {dtype} are not loaded, and cannot be now: call prepare({op!r}, {dtype}) of "
                "the communicator (in a virtual world: of the world) before the capture and before any rank's call."
            )
        engine.prepare(op, dtype)
