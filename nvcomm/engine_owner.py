# SPDX-License-Identifier: Apache-2.0
"""What a communicator is between its calls: open, broken, half way, watched, brought back, closed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import torch

from nvcomm import log
from nvcomm.errors import NvcommError, UsageError
from nvcomm.host.headers import MAX_TAG
from nvcomm.options import is_count
from nvcomm.stats import Audit, Stats
from nvcomm.watcher import Watcher
from nvcomm.worlds import Engine


class EngineOwner:
    """Owns a rank's engine: whoever calls it comes through here.

    Args:
        engine: of this rank.
        device: where its tensors live.
        max_bytes: most bytes a rank contributes to a call.
        stream: the rank's own, in a virtual world on a GPU.

    Attributes: those of `nvcomm.communicator.Communicator`.
    """

    def __init__(
        self, engine: Engine, device: torch.device, max_bytes: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._engine: Engine | None = engine
        self._pid = os.getpid()
        self.stream = stream
        self.pending: object = None
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
        if self._engine is not None and os.getpid() == self._pid:
            self._engine.close()  # raises, and can be called again, while another thread is inside
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._pid == os.getpid():
            warnings.warn(f"rank {self.rank}: a communicator was not closed", ResourceWarning, stacklevel=2)
