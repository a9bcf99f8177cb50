# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM and SGLang call `CustomAllreduce`, over a communicator.

Both build one per tensor-parallel group and ask it before each collective: `should_custom_ar(x)`, then
`custom_all_reduce(x)`, which returns a new tensor, or None for "not me". A `None` sends the caller to NCCL, so all that
decides it (dtype, size, shape, `disabled`) is the same on every rank.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nvcomm.arguments import REDUCED_DTYPES
from nvcomm.communicator import Communicator
from nvcomm.env import is_set, settings
from nvcomm.errors import CapabilityError, NvcommError, UnsupportedError
from nvcomm.mailbox import MAX_WORLD_SIZE
from nvcomm.options import DEFAULT_MAX_BYTES
from nvcomm.watcher import Watcher
from nvcomm.worlds import resolve_device

MIB = 1 << 20
# Ranks of a server may be a compilation of the model apart before they meet.
SERVER_TIMEOUT_S = 300.0


class CustomAllreduce:
    """All-reduce, all-gather and reduce-scatter of one tensor-parallel group; not for several threads at once.

    Attributes:
        disabled: nvcomm takes nothing; the reason was logged.
        rank, world_size, device, group: as given.
        max_size, max_all_gather_size, max_reduce_scatter_size: most bytes of an input of each operation.
        fully_connected: every rank stores into every other's memory; True unless disabled.
        mnnvl_multicast_ptr, mnnvl_lamport_ag_multicast_ptr: address of the multicast mapping of the mailboxes, 0
            without one. Models read whether it is 0, to see whether the ranks have NVLink multicast.
        batch_invariant: whether an input of any size has to be summed here, in one order.

    Args:
        group: the ranks; not one of NCCL.
        device: this rank's.
        max_size: see above; at most the communicator's `max_bytes` counts, as for the next two.
        max_all_gather_size: the same of an all-gather without multicast.
        max_mnnvl_all_gather_size: the same with multicast; default: all that the communicator takes.
        max_reduce_scatter_size: see above.
        max_mnnvl_reduce_scatter_size: not used: with multicast the same kernel runs.
        max_mnnvl_multimem_reduce_scatter_size: not used, likewise.
        symm_mem_enabled: not used: it makes vLLM's class leave larger messages to symmetric memory.
        register_graph_buffers: not used: no buffer of a graph is registered.

    Raises:
        GroupError: a rank did not answer in time.
    """

    log = logging.getLogger("nvcomm.integrations")
    batch_invariant = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 8 * MIB,
        max_all_gather_size: int = 2 * MIB,
        max_mnnvl_all_gather_size: int | None = None,
        max_reduce_scatter_size: int = 16 * MIB,
        max_mnnvl_reduce_scatter_size: int = 16 * MIB,
        max_mnnvl_multimem_reduce_scatter_size: int = 64 * MIB,
        symm_mem_enabled: bool = False,
        *,
        register_graph_buffers: bool = True,
    ) -> None:
        self._IS_CAPTURING = False
        self._comm: Communicator | None = None
        self._watcher: Watcher | None = None
        self.disabled = True
        self.batch_invariant = self.wants_batch_invariance()
        self.fully_connected = False
        self.mnnvl_multicast_ptr = 0
        self.mnnvl_lamport_ag_multicast_ptr = 0
        self.max_size = self.max_all_gather_size = self.max_reduce_scatter_size = 0
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device = resolve_device(device)
        if self.world_size == 1:
            return
        if self.world_size > MAX_WORLD_SIZE:
            self.log.warning("nvcomm is off: %d ranks; it takes up to %d.", self.world_size, MAX_WORLD_SIZE)
            return
        try:
            comm = Communicator(group, self.device, **self.options())
        except (CapabilityError, UnsupportedError) as error:  # the same on every rank, so all of them go on without
            self.log.warning("nvcomm is off: %s", error)
            return
        self._comm = comm
        if self.device.type == "cuda":
            # Graphs are replayed without a call of ours that could raise. On the CPU every call raises by itself.
            self._watcher = comm.watch(functools.partial(end_process, self.log))
        self.disabled = False
        self.fully_connected = True
        self.mnnvl_multicast_ptr = self.mnnvl_lamport_ag_multicast_ptr = _multicast_ptr(comm)
        wanted = comm.max_bytes if max_mnnvl_all_gather_size is None else max_mnnvl_all_gather_size
        wanted = wanted if self.mnnvl_multicast_ptr else max_all_gather_size
        self.max_size = min(max_size, comm.max_bytes)
        self.max_all_gather_size = min(wanted, comm.max_bytes)
        self.max_reduce_scatter_size = min(max_reduce_scatter_size, comm.max_bytes)
        if self.rank == 0:
            self.log.info("nvcomm carries the collectives of %d ranks on %s.", self.world_size, self.device.type)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """What the communicator is built with."""
        timeout_s = settings().timeout_s if is_set("NVCOMM_TIMEOUT_S") else SERVER_TIMEOUT_S
        return {"max_bytes": DEFAULT_MAX_BYTES, "timeout_s": timeout_s}

    @classmethod
    def wants_batch_invariance(cls) -> bool:
        """What `batch_invariant` becomes."""
        return False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of graphs: inside, all-reduces outside of a capturing stream are warm-ups."""
        self._IS_CAPTURING = True
        try:
            yield
        finally:
            self._IS_CAPTURING = False
            self.register_graph_buffers()

    def register_graph_buffers(self) -> None:
        """Nothing to tell: a kernel stores into mailboxes, whose addresses never change, and reads its own inputs."""

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether `custom_all_reduce` takes `inp`."""
        return self._takes(inp, REDUCED_DTYPES) and (self.batch_invariant or inp.nbytes <= self.max_size)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks, shaped and laid out like `input`; None if `should_custom_ar` says no.

        A warm-up inside `capture` returns zeros and sends nothing, but loads what the capture will need.
        """
        if not self.should_custom_ar(input):
            return None
        if self._IS_CAPTURING and not self._stream_captures():
            self.comm.prepare("all_reduce", input.dtype)
            return torch.zeros_like(input)
        return self.all_reduce(input)

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False
    ) -> torch.Tensor:
        """The sum over the ranks, at any size: in pieces of `max_size`, with the same bits as whole.

        Args:
            inp: of one of the reduced dtypes.
            out: like `inp`; default: a new tensor of its strides.
            registered: not used: inputs are read where they lie.
        """
        out = torch.empty_like(inp) if out is None else out
        x = inp.detach().contiguous()
        # Strides other than plain ones need a copy in, and one out.
        y = out if out.is_contiguous() else torch.empty_like(x)
        step = self.max_size // inp.element_size()
        for piece, result in zip(x.view(-1).split(step), y.view(-1).split(step), strict=True):
            self.comm.all_reduce(piece, result)
        return out if y is out else out.copy_(y)

    def should_custom_all_gather(self, inp: torch.Tensor) -> bool:
        """Whether `custom_all_gather` takes `inp`: any dtype."""
        return self._takes(inp) and inp.dim() > 0 and inp.is_contiguous() and inp.nbytes <= self.max_all_gather_size

    def custom_all_gather(self, inp: torch.Tensor) -> torch.Tensor | None:
        """(world_size * n, ...) of inputs (n, ...), bit for bit; None if `should_custom_all_gather` says no.

        Runs in a warm-up too: its result may be used as an index.
        """
        if not self.should_custom_all_gather(inp):
            return None
        return self.comm.all_gather(inp.detach()).flatten(0, 1)

    def should_custom_reduce_scatter(self, inp: torch.Tensor) -> bool:
        """Whether `custom_reduce_scatter` takes `inp`."""
        if self.batch_invariant:  # a batch of another size would be summed by something else, in another order
            return False
        taken = self._takes(inp, REDUCED_DTYPES) and inp.dim() > 0 and inp.is_contiguous()
        return taken and inp.shape[0] % self.world_size == 0 and inp.nbytes <= self.max_reduce_scatter_size

    def should_mnnvl_multimem_reduce_scatter(self, inp: torch.Tensor) -> bool:
        """False: this asks for a kernel of vLLM's own, which is not here."""
        return False

    def custom_reduce_scatter(self, inp: torch.Tensor) -> torch.Tensor | None:
        """(n / world_size, ...) of inputs (n, ...): this rank's part of the sum; None as above."""
        if not self.should_custom_reduce_scatter(inp):
            return None
        return self.comm.reduce_scatter(inp.detach())

    @property
    def comm(self) -> Communicator:
        """The communicator below."""
        if self._comm is None:
            raise UnsupportedError(f"rank {self.rank}: nvcomm is off for this group, or closed.")
        return self._comm

    def close(self) -> None:
        """Gives everything back, once; afterwards nothing is taken."""
        self.disabled = True
        watcher, self._watcher = self._watcher, None
        comm, self._comm = self._comm, None
        if watcher is not None:
            watcher.close()
        if comm is not None:
            comm.close()

    def __del__(self) -> None:
        # vLLM and SGLang only drop the last reference.
        if getattr(self, "_comm", None) is not None:
            self.close()

    @staticmethod
    def create_shared_buffer(
        size_in_bytes: int, group: dist.ProcessGroup | None = None, uncached: bool | None = False
    ) -> list[int]:
        """Raises UnsupportedError: memory that the ranks share is for kernels which are not here."""
        raise UnsupportedError("nvcomm keeps its own mailboxes and hands out no shared buffer: use symmetric memory.")

    @staticmethod
    def free_shared_buffer(
        pointers: list[int], group: dist.ProcessGroup | None = None, rank: int | None = None
    ) -> None:
        """Raises UnsupportedError, as `create_shared_buffer`."""
        raise UnsupportedError("nvcomm has given out no shared buffer.")

    def _takes(self, inp: torch.Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> bool:
        # Callers switch `disabled` on and off, also of what is closed.
        if self.disabled or self._comm is None or inp.device != self.device:
            return False
        if dtypes is not None and inp.dtype not in dtypes:
            return False
        plain = inp.layout == torch.strided and not inp.is_nested and not inp.is_quantized
        return plain and not (inp.is_conj() or inp.is_neg())

    def _stream_captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def end_process(log: logging.Logger, error: NvcommError) -> None:
    """Ends a worker whose communicator broke: what it would compute from now on is made of words that never came.

    By SIGTERM, for which serving software has a handler; it sees a dead worker and stops the server.
    """
    log.critical("ending this worker: %s", error)
    os.kill(os.getpid(), signal.SIGTERM)


def _multicast_ptr(comm: Communicator) -> int:
    engine: Any = comm.engine
    return int(engine.memory.multicast_ptr) if getattr(engine, "multicast", False) else 0
