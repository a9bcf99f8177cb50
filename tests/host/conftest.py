# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of the test's process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nvcomm.errors import PeerTimeoutError
from nvcomm.host import HostEngine, local_engines
from nvcomm.virtual import VirtualWorld
from tests.audit import assert_clean, audited, ended_well
from tests.threads import together

# What a busy machine may add to any time that is measured, and how late anybody may be.
LATE_S = 20.0


class Ranks:
    """Engines that work on one set of mailboxes, and a thread for each."""

    def __init__(self, engines: list[HostEngine]) -> None:
        self.engines = engines

    def run(self, work: Callable[[HostEngine], Any], limit_s: float = 120.0) -> list[Any]:
        """`work(engine)` on every rank at once; element r is its result, or the exception that it raised."""
        return together([functools.partial(work, engine) for engine in self.engines], limit_s)

    def run_clean(self, work: Callable[[HostEngine], Any]) -> list[Any]:
        """The same; no rank may raise, and afterwards every word is EMPTY and all ranks are at one place."""
        results = self.run(work)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:  # rather the cause than a timeout that followed from it
            raise min(errors, key=lambda error: isinstance(error, PeerTimeoutError))
        self.assert_audit()
        return results

    def hurry(self, timeout_s: float = 0.2) -> None:
        """From now on waits are short. Before, they were not: on a busy machine a rank may be seconds behind."""
        for engine in self.engines:
            engine._port.timeout_s = timeout_s

    def meet_before_waiting(self, *present: int) -> None:
        """In their next call these ranks begin to wait once all of them have sent: only who is missing is late."""
        sent = threading.Barrier(len(present))
        for rank in present:
            steps = self.engines[rank]._steps

            def collect(*args: Any, steps: Any = steps, original: Callable[..., None] = steps.collect) -> None:
                steps.collect = original
                sent.wait(LATE_S)
                original(*args)

            steps.collect = collect  # type: ignore[method-assign]

    def assert_audit(self) -> None:
        """Every mailbox is empty, and all ranks are at one generation and slot."""
        audits = [engine.audit() for engine in self.engines]
        assert [audit.dirty_words for audit in audits] == [0] * len(audits)
        assert len({(audit.slot, audit.generation) for audit in audits}) == 1


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """A factory: `ranks(world_size, max_bytes=..., **HostEngine options)`."""
    opened: list[Ranks] = []

    def build(world_size: int, max_bytes: int = 1 << 16, **options: Any) -> Ranks:
        opened.append(Ranks(local_engines(world_size, max_bytes, **{"timeout_s": 30.0} | options)))
        return opened[-1]

    yield build
    try:
        for world in opened:
            if ended_well(world.engines) and not any(engine._closed for engine in world.engines):
                assert_clean(world.engines)
    finally:
        for world in opened:
            for engine in world.engines:
                engine.close()


@pytest.fixture(scope="session", autouse=True)
def every_world_is_audited() -> Iterator[None]:
    """Every virtual world of these tests is audited when it is closed."""
    patch = pytest.MonkeyPatch()
    patch.setattr(VirtualWorld, "close", audited(VirtualWorld.close))
    yield
    patch.undo()


@pytest.fixture
def gather() -> Callable[..., torch.Tensor]:
    """`gather(engine, x)`: a new output tensor, poisoned before the call."""

    def call(engine: HostEngine, x: torch.Tensor, **options: Any) -> torch.Tensor:
        out = torch.full((engine.world_size, x.numel() * x.element_size()), 0x5A, dtype=torch.uint8)
        engine.all_gather(x, out, **options)
        return out

    return call
