# SPDX-License-Identifier: Apache-2.0
"""Ranks whose mailbox kernels run in the emulator: mailboxes, states and tensors in one memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nvcomm import jit, mailbox
from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
from nvcomm.mailbox import EMPTY, MailboxLayout
from tests.emulator.machine import Machine
from tests.emulator.memory import Memory
from tests.emulator.program import Launch, Program
from tests.emulator.values import float_bits

TIMEOUT_NS = 10**15  # never


@functools.cache
def program(kernel: type[Any], config: AllGatherConfig | ReduceConfig | MhcConfig) -> Program:
    """A kernel's PTX, compiled once."""
    made = kernel(config)
    return Program(jit.artifacts(made, *made.fake_args(), arch="sm_90a").ptx)


class Ranks:
    """Mailboxes and states of all ranks.

    Args:
        layout: of the mailboxes.
        seed: of all that is random.
        generation: where the count begins.
        timeout_ns: bound of every wait; the clock goes on by `machine.TURN_NS` a turn.
        late: whether words reach mailboxes late; the own copy too.
    """

    def __init__(
        self, layout: MailboxLayout, seed: int, generation: int = 0, timeout_ns: int = TIMEOUT_NS, *, late: bool = False
    ) -> None:
        self.layout = layout
        self._timeout_ns = timeout_ns
        self.memory = Memory(seed)
        self.machine = Machine(self.memory, seed)
        armed = np.full(layout.size_bytes // 4, EMPTY, np.uint32)
        armed[layout.faults_base // 4 :] = 0
        state = np.zeros(mailbox.STATE_WORDS, np.uint32)
        state[mailbox.STATE_GENERATION] = generation
        ranks = range(layout.world_size)
        self.mailboxes = [self.memory.allocate(armed) for _ in ranks]
        self.states = [self.memory.allocate(state) for _ in ranks]
        self._faults = [self.memory.allocate(bytes(mailbox.FAULT_BYTES)) for _ in ranks]
        for start in self.mailboxes if late else ():
            self.memory.arrives_late(start, layout.faults_base, EMPTY)

    def put(self, tensor: torch.Tensor | None, offset: int = 0) -> int:
        """A copy of a tensor in the memory, `offset` bytes behind a multiple of 256; 0 for None."""
        if tensor is None:
            return 0
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if offset == 0:
            return self.memory.allocate(data)
        return self.memory.allocate(bytes(offset) + data) + offset

    def get(self, addr: int, like: torch.Tensor) -> torch.Tensor:
        """What lies there, as a tensor like `like`."""
        data = bytearray(self.memory.bytes_at(addr, like.nbytes)) if like.nbytes else bytearray()
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape) if like.nbytes else like.clone()

    def box(self, rank: int) -> list[int]:
        """Peers, multicast pointer, state, fault record and timeout, as kernels take them."""
        world_size = self.layout.world_size
        peers = [self.mailboxes[(rank + i) % world_size] for i in range(world_size)]
        return [*peers, 0, self.states[rank], self._faults[rank], self._timeout_ns]

    def run(self, chains: Sequence[Sequence[Launch]], slow: int | None = None, limit: int = 1_000_000) -> None:
        """See `Machine.run`; afterwards everything has landed."""
        self.machine.run(chains, slow, limit)
        self.memory.drain()

    def run_together(self, launches: Sequence[Launch]) -> None:
        """One launch of each rank."""
        self.run([[launch] for launch in launches])

    def gather_launch(
        self, config: AllGatherConfig, rank: int, inp: int, out: int, num_bytes: int, call: tuple[int, int, int],
        ctas: int = 1,
    ) -> Launch:  # fmt: skip
        """A gather of one rank; `call` as `nvcomm.handle.Call` has it: site, kind, tag."""
        parameters = [inp, out, num_bytes, *self.box(rank), rank, *call]
        return Launch(program(AllGatherKernel, config), parameters, (ctas, 1, 1), config.threads)

    def reduce_launch(
        self,
        kernel: type[Any],
        config: ReduceConfig,
        rank: int,
        inp: int,
        out: int,
        sizes: list[int],
        ctas: int,
        call: tuple[int, int, int] = (1, 0, 0),
    ) -> Launch:
        """A launch of a reducing kernel.

        Args:
            kernel, config: what is launched.
            rank: by whom.
            inp, out: addresses.
            sizes: bytes, or rows and bytes of a row.
            ctas: of the grid.
            call: what it says of itself: launch, operation and dtype, tag.
        """
        parameters = [inp, out, *sizes, *self.box(rank), rank, *call]
        return Launch(program(kernel, config), parameters, (ctas, 1, 1), config.threads)

    def mhc_launch(
        self, config: MhcConfig, rank: int, sources: list[int], tensors: list[int], eps: float, rows: int,
        clusters: int, call: tuple[int, int, int] = (1, 0, 0),
    ) -> Launch:  # fmt: skip
        """A launch of the fused kernel."""
        parameters = [*sources, *tensors, float_bits(eps), rows, *self.box(rank), rank, *call]
        kernel = AllReduceMhcKernel(config)
        return Launch(
            program(AllReduceMhcKernel, config), parameters, (clusters * kernel.ctas, 1, 1), config.threads,
            kernel.cluster, kernel.shared_bytes or 0,
        )  # fmt: skip

    def fault(self, rank: int) -> list[int]:
        """What a rank recorded: kind, rank, rank waited for, generation, slot, word, microseconds."""
        return np.frombuffer(self.memory.bytes_at(self._faults[rank], 28), np.uint32).tolist()

    def assert_clean(self, calls: int, generation: int = 0) -> None:
        """Every word EMPTY, no fault, every rank behind the same call, and nobody still counted as arrived."""
        for rank in range(self.layout.world_size):
            words = np.frombuffer(self.memory.bytes_at(self.mailboxes[rank], self.layout.size_bytes), np.uint32)
            end = self.layout.faults_base // 4
            assert (words[:end] == EMPTY).all(), f"rank {rank}: {(words[:end] != EMPTY).sum()} dirty words"
            assert not words[end:].any()
            state = np.frombuffer(self.memory.bytes_at(self.states[rank], mailbox.STATE_WORDS * 4), np.uint32)
            assert state[mailbox.STATE_SLOT] == calls % mailbox.NUM_SLOTS
            assert state[mailbox.STATE_GENERATION] == (generation + calls) % 2**32
            assert state[mailbox.STATE_ARRIVED] == 0
            assert state[mailbox.STATE_BROKEN] == 0
