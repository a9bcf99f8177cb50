# SPDX-License-Identifier: Apache-2.0
"""What a fault of the host world happens to: one rank's communicator, and where its calls can be met half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import torch

from nvcomm.communicator import Communicator
from nvcomm.errors import NvcommError
from nvcomm.group import StoreGroup
from nvcomm.host import HostEngine
from nvcomm.host.port import Port
from nvcomm.host.steps import Row
from nvcomm.host.transport import DirectTransport
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Words
from stress.faults.common import WORDS
from stress.faults.table import ODD_RANK

TIMEOUT_S = 1.0
LIMIT_S = 60.0  # for all ranks of a fault to end, and of every wait that is not the fault itself


class Scene:
    """One rank, in its process, with a fault about to happen.

    Attributes:
        comm: its communicator.
        group: the ranks.
        odd: whether it is the one that does what it should not.
        reported: what its watcher was told.
    """

    def __init__(self, group: StoreGroup, generation: int) -> None:
        self.group = group
        self.comm = Communicator(group, "cpu", timeout_s=LIMIT_S, generation=generation)
        self.odd = group.rank == ODD_RANK
        self.reported: list[NvcommError] = []

    def gather(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """One gather, of a tensor that tells its rank."""
        return self.comm.all_gather(torch.full((WORDS,), 1 + self.comm.rank, dtype=torch.int32) if x is None else x)

    def gather_in_vain(self) -> None:
        """A gather that the odd rank does not come to. Its wait alone is short: everybody else may be seconds late."""
        steps = self.engine._steps
        hear = steps.hear

        def hear_all_of_it(src_rank: int) -> None:
            deadline = time.monotonic() + LIMIT_S
            while src_rank != ODD_RANK and not self.port.own.faults[src_rank][0] and time.monotonic() < deadline:
                time.sleep(1e-3)
            hear(src_rank)

        steps.hear = hear_all_of_it  # type: ignore[method-assign]
        with self.short_waits():
            self.gather()

    @contextlib.contextmanager
    def short_waits(self) -> Iterator[None]:
        """Inside the block a wait ends after TIMEOUT_S."""
        self.port.timeout_s = TIMEOUT_S
        try:
            yield
        finally:
            self.port.timeout_s = LIMIT_S

    def when_it_waits(self) -> threading.Event:
        """Is set as soon as this rank waits for the others in its next call."""
        steps, waits = self.engine._steps, threading.Event()
        collect = steps.collect

        def tell_and_collect(rows: list[Row], waiting: Waiting) -> None:
            waits.set()
            collect(rows, waiting)

        steps.collect = tell_and_collect  # type: ignore[method-assign]
        return waits

    @property
    def engine(self) -> HostEngine:
        """Behind the communicator."""
        engine = self.comm.engine
        assert isinstance(engine, HostEngine)
        return engine

    @property
    def port(self) -> Port:
        """Where words leave from."""
        return self.engine._port


class SignallingTransport(DirectTransport):
    """Sends its own process a signal before its second store: the first has reached one rank, and nobody else."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._stores = 0

    def store(self, lane: int, target: Words, words: Words) -> None:
        """See `Transport.store`."""
        self._stores += 1
        if self._stores == 2:
            os.kill(os.getpid(), self._number)
        super().store(lane, target, words)
