# SPDX-License-Identifier: Apache-2.0
"""A world whose ranks all live in this process: streams on one GPU, or threads on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import torch

from nvcomm import log
from nvcomm.arguments import check_input, check_output, part_shape
from nvcomm.communicator import Communicator
from nvcomm.env import settings
from nvcomm.errors import UsageError
from nvcomm.options import DEFAULT_MAX_BYTES, Options, Pdl, Protocol, Transport, check_world_size
from nvcomm.worlds import build_world, resolve_device

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp, ReduceProtocol


class VirtualWorld(Sequence[Communicator]):
    """The communicators of all ranks, and calls that make them work together; public as `nvcomm.virtual_world`.

    A rank's kernel waits for its peers' kernels, so whoever calls the ranks one by one on a GPU must not let the
    device synchronise in between (R9). The group calls below see to that.

    Example:
        >>> with nvcomm.virtual_world(4) as world:
        ...     ys = world.all_gather([x0, x1, x2, x3])
    """

    def __init__(
        self,
        world_size: int,
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
        """Builds every rank; see `nvcomm.options.Options` for the arguments, `Communicator` for the errors."""
        timeout_s = settings().timeout_s if timeout_s is None else timeout_s
        options = Options(max_bytes, timeout_s, pdl, device_share, generation, protocol, transport, seed)
        check_world_size(world_size)
        log.configure()
        self.device = resolve_device(device)
        self._backend = build_world(world_size, self.device, options)
        self._comms = [
            Communicator.from_engine(engine, self.device, max_bytes, stream)
            for engine, stream in zip(self._backend.engines, self._backend.streams, strict=True)
        ]

    def all_gather(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """One all-gather of all ranks: allocates for all before it launches any (R9).

        Args:
            xs: rank r's input at index r.
            outs: rank r's output at index r, or None for new tensors; see `Communicator.all_gather`.

        Returns:
            The outputs, ready on the current stream.
        """
        self._check_ranks("all_gather", xs, outs, lambda x, rank: (len(self), *x.shape))
        results = list(outs) if outs is not None else [x.new_empty((len(self), *x.shape)) for x in xs]
        self.run(lambda comm: comm.all_gather(xs[comm.rank], results[comm.rank]))
        return results

    def all_reduce(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        *,
        protocol: ReduceProtocol = "auto",
    ) -> list[torch.Tensor]:
        """One all-reduce of all ranks; see `all_gather` and `Communicator.all_reduce`."""
        self._check_ranks("all_reduce", xs, outs, lambda x, rank: tuple(x.shape))
        self.prepare("all_reduce", xs[0].dtype)
        results = list(outs) if outs is not None else [torch.empty_like(x) for x in xs]
        self.run(lambda comm: comm.all_reduce(xs[comm.rank], results[comm.rank], protocol=protocol))
        return results

    def reduce_scatter(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """One reduce-scatter of all ranks; see `all_gather` and `Communicator.reduce_scatter`."""
        self._check_ranks("reduce_scatter", xs, outs, lambda x, rank: part_shape(x, rank, len(self)))
        self.prepare("reduce_scatter", xs[0].dtype)
        if outs is None:
            outs = [x.new_empty(part_shape(x, rank, len(self))) for rank, x in enumerate(xs)]
        results = list(outs)
        self.run(lambda comm: comm.reduce_scatter(xs[comm.rank], results[comm.rank]))
        return results

    def prepare(self, op: ReduceOp, dtype: torch.dtype) -> None:
        """Compiles and loads what `op` needs for `dtype` on every rank; nothing may be under way on the device."""
        for comm in self._comms:
            if not comm.engine.ready(op, dtype):
                comm.prepare(op, dtype)

    def _check_ranks(
        self,
        op: str,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
        shape: Callable[[torch.Tensor, int], tuple[int, ...]],
    ) -> None:
        """Raises UsageError for what ranks of several processes would only find out by waiting for each other."""
        for name, tensors in (("inputs", xs), ("outputs", outs)):
            if tensors is None and name == "outputs":
                continue
            if not isinstance(tensors, list | tuple) or len(tensors) != len(self):
                count = len(tensors) if isinstance(tensors, list | tuple) else f"a {type(tensors).__name__} as"
                raise UsageError(
                    f"{op}: got {count} {name}; wanted a list of one tensor for each of {len(self)} ranks."
                )
        for rank, x in enumerate(xs):
            check_input(x, self.device, self._comms[rank].max_bytes, op)
            # Bytes are gathered, whatever they mean; sums need the same of every rank.
            same = x.nbytes == xs[0].nbytes if op == "all_gather" else (x.dtype, x.shape) == (xs[0].dtype, xs[0].shape)
            if not same:
                raise UsageError(
                    f"{op}: rank 0 has {xs[0].dtype} {tuple(xs[0].shape)} and rank {rank} {x.dtype} {tuple(x.shape)}; "
                    f"wanted the same {'number of bytes' if op == 'all_gather' else 'dtype and shape'} on every rank."
                )
            if outs is not None:
                check_output(outs[rank], x, shape(x, rank), op)

    def run(self, call: Callable[[Communicator], object]) -> None:
        """Calls `call(comm)` for every rank on its own stream or thread, behind the current stream and before it."""
        _ = self._comms[0].engine  # raises where the world is closed
        self._backend.run(self._comms, call)

    def stream(self, rank: int) -> torch.cuda.Stream:
        """The stream of `rank` on a GPU; capture graphs of single ranks on it."""
        stream = self._comms[rank].stream
        if stream is None:
            raise UsageError("ranks on the CPU are threads and have no stream: call run(), which works on both.")
        return stream

    def reset(self) -> None:
        """Brings every rank back after a fault; see `Communicator.reset`."""
        _ = self._comms[0].engine  # raises where the world is closed
        self._backend.reset()
        for comm in self._comms:
            comm.forget_pending()

    def close(self) -> None:
        """Closes every rank."""
        for comm in self._comms:
            comm.close()
        self._backend.close()

    def __len__(self) -> int:
        return len(self._comms)

    def __getitem__(self, rank: int) -> Communicator:  # type: ignore[override]
        return self._comms[rank]

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._comms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Its public name: to a user it is a call like any other.
virtual_world = VirtualWorld
