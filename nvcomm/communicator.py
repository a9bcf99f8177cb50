# SPDX-License-Identifier: Apache-2.0
"""The communicator: one rank's end of a group, its mailbox and its collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch

from nvcomm import log
from nvcomm.arguments import check_input, check_output, part_shape
from nvcomm.collectives.all_reduce_mhc_checks import sizes_of
from nvcomm.env import settings
from nvcomm.errors import NvcommError, UsageError
from nvcomm.group import as_group
from nvcomm.host.headers import MAX_TAG
from nvcomm.options import DEFAULT_MAX_BYTES, Options, Pdl, Protocol, Transport, is_count
from nvcomm.stats import Audit, Stats
from nvcomm.watcher import Watcher
from nvcomm.worlds import Engine, build_rank, device_of_all

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp, ReduceProtocol
    from nvcomm.collectives.all_reduce_mhc import AllReduceMhc
    from nvcomm.collectives.all_reduce_mhc_config import MhcPart
    from nvcomm.virtual import VirtualWorld


class Communicator:
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
        ranks = as_group(group)
        log.configure(ranks.rank)
        target = device_of_all(ranks, device, timeout_s)
        self._attach(build_rank(ranks, target, options), target, max_bytes)

    @classmethod
    def from_engine(
        cls, engine: Engine, device: torch.device, max_bytes: int, stream: torch.cuda.Stream | None = None
    ) -> Self:
        """A communicator over an engine that exists already, with a stream of its own (virtual worlds)."""
        comm = cls.__new__(cls)
        comm._attach(engine, device, max_bytes)
        comm.stream = stream
        return comm

    def _attach(self, engine: Engine, device: torch.device, max_bytes: int) -> None:
        self._engine: Engine | None = engine
        self._pid = os.getpid()
        self.stream: torch.cuda.Stream | None = None
        self.pending: object = None
        self._boundaries: dict[tuple[int, int], AllReduceMhc] = {}
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.device = device
        self.max_bytes = max_bytes
        log.logger.info("rank %d of %d on %s: calls of up to %d bytes", self.rank, self.world_size, device, max_bytes)

    @property
    def engine(self) -> Engine:
        """The engine below; raises UsageError once closed, or in a forked child."""
        if self._engine is None:
            raise UsageError(f"rank {self.rank}: this communicator is closed; build a new one.")
        if os.getpid() != self._pid:
            raise UsageError(
                f"rank {self.rank}: this communicator belongs to process {self._pid} and was used in {os.getpid()}, "
                "forked from it: build one in the child, or start processes with spawn."
            )
        return self._engine

    @property
    def tag(self) -> int:
        """The caller's own mark of the calls that follow, 0 to 65535; compared with NVCOMM_DEVICE_CHECKS=1 (R11)."""
        return self.engine.tag

    @tag.setter
    def tag(self, tag: int) -> None:
        if not is_count(tag, 0, MAX_TAG):
            raise UsageError(f"rank {self.rank}: tag is {tag!r}; wanted a whole number from 0 to {MAX_TAG}.")
        self.engine.tag = tag

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
            UsageError: no kernel takes this shape, or called while a CUDA graph is captured.
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

    def begin(self, op: str, *, pending: object = None, completes: bool = False) -> None:
        """What every collective does before it is launched: raises what was recorded, and pairs halves of operations.

        Args:
            op: its name.
            pending: the operation that has to come next, if `op` is a first half; what `str` names it.
            completes: whether `op` is a second half.

        Raises:
            UsageError: a first half waits for its second.
            PeerTimeoutError, CollectiveMismatchError: an earlier call failed.
        """
        if self.pending is not None and not completes:
            raise UsageError(
                f"{op}: a contribution was published and not yet collected: {self.pending} has to be next."
            )
        self.check()
        self.pending = pending

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

    def serving(self) -> AbstractContextManager[None]:
        """With the delayed transport on a GPU: delivers what the calls inside the block publish, captured or not.

        A copy may land after its collective has ended, but not after the block. Calls outside a block have one each.
        On other transports it does nothing.
        """
        return self.engine.serving()

    def check(self) -> None:
        """Raises what this rank recorded, for instance PeerTimeoutError. Costs a memory read where all is well."""
        error = self.engine.fault()
        if error is not None:
            raise error

    def watch(self, on_fault: Callable[[NvcommError], object], interval_s: float = 0.1) -> Watcher:
        """Calls `on_fault(error)` from another thread when this rank breaks: for servers that only replay graphs.

        Returns:
            A context manager; see `nvcomm.watcher.Watcher`.
        """
        return Watcher(self, on_fault, interval_s)

    def stats(self) -> Stats:
        """Calls, bytes, escapes and longest waits since construction. CUDA: waits for the device."""
        return self.engine.stats()

    def audit(self) -> Audit:
        """Reads this rank's mailbox back, between calls: anything but 0 dirty words is a bug. CUDA: waits."""
        return self.engine.audit()

    def reset(self) -> None:
        """Brings a broken communicator back. Collective, blocking; every rank must be alive (R10b).

        Raises:
            GroupError: a rank did not take part in time; the communicator stays broken: build a new one.
        """
        self.engine.reset()
        self.forget_pending()
        log.logger.info("rank %d of %d: reset", self.rank, self.world_size)

    def forget_pending(self) -> None:
        """After a reset no first half of an operation waits for its second."""
        self.pending = None

    def close(self) -> None:
        """Gives everything back. Local; on every rank, once no call is under way and no graph of its calls will run."""
        engine, self._engine = self._engine, None
        self._boundaries.clear()
        if engine is not None and os.getpid() == self._pid:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._pid == os.getpid():
            warnings.warn(f"rank {self.rank}: a communicator was not closed", ResourceWarning, stacklevel=2)


def virtual_world(world_size: int, device: torch.device | str | int | None = None, **options: object) -> VirtualWorld:
    """All ranks in this process: streams on one GPU, or threads on the CPU. See `nvcomm.virtual.VirtualWorld`."""
    from nvcomm.virtual import VirtualWorld

    return VirtualWorld(world_size, device, **options)  # type: ignore[arg-type]
