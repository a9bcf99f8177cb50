# SPDX-License-Identifier: Apache-2.0
"""Ranks whose kernels run on the CPU, from their PTX: mailboxes, states and tensors in one simulated memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from nvcomm import jit, mailbox
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
from nvcomm.collectives.all_reduce_mhc_norm import shared_bytes as norm_bytes
from nvcomm.mailbox import EMPTY, MailboxLayout
from tests.unit.ptx_machine import Grid, Machine, Memory, Program, bits_of

TIMEOUT_NS = 10**15


@functools.cache
def program(kernel: type[Any], config: ReduceConfig | MhcConfig) -> Program:
    """A kernel's PTX, compiled once."""
    made = kernel(config)
    return Program(jit.artifacts(made, *made.fake_args(), arch="sm_90a").ptx)


class Ranks:
    """Mailboxes and states of all ranks.

    Args:
        layout: of the mailboxes.
        seed: of the order in which threads take turns.
        generation: where the count begins.
        timeout_ns: bound of every wait; see `ptx_machine.TURN_NS`.
    """

    def __init__(self, layout: MailboxLayout, seed: int, generation: int = 0, timeout_ns: int = TIMEOUT_NS) -> None:
        self.layout = layout
        self._timeout_ns = timeout_ns
        self.memory = Memory()
        self._machine = Machine(self.memory, seed)
        armed = np.full(layout.size_bytes // 4, EMPTY, np.uint32)
        armed[layout.faults_base // 4 :] = 0
        state = np.zeros(mailbox.STATE_WORDS, np.uint32)
        state[mailbox.STATE_GENERATION] = generation
        ranks = range(layout.world_size)
        self._mailboxes = [self.memory.allocate(armed.tobytes()) for _ in ranks]
        self._states = [self.memory.allocate(state.tobytes()) for _ in ranks]
        self._faults = [self.memory.allocate(bytes(mailbox.FAULT_BYTES)) for _ in ranks]

    def put(self, tensor: torch.Tensor | None, offset: int = 0) -> int:
        """A copy of a tensor in the simulated memory, `offset` bytes behind a multiple of 256; 0 for None."""
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
        peers = [self._mailboxes[(rank + i) % world_size] for i in range(world_size)]
        return [*peers, 0, self._states[rank], self._faults[rank], self._timeout_ns]

    def run(self, grids: list[Grid]) -> None:
        """Runs grids together."""
        self._machine.run(grids)

    def run_chains(self, chains: list[list[Grid]], slow: int, limit: int = 20_000_000) -> None:
        """Runs each rank's grids one after the other, rank `slow` far behind the others."""
        self._machine.run_chains(chains, limit, slow)

    def reduce_grid(
        self,
        kernel: type[Any],
        config: ReduceConfig,
        rank: int,
        inp: int,
        out: int,
        sizes: list[int],
        ctas: int,
        call: tuple[int, int, int] = (1, 0, 0),
    ) -> Grid:
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
        return Grid(program(kernel, config), parameters, ctas=ctas, threads=config.threads)

    def mhc_grid(
        self, config: MhcConfig, rank: int, sources: list[int], tensors: list[int], eps: float, rows: int, clusters: int
    ) -> Grid:
        """A launch of the fused kernel."""
        parameters = [*sources, *tensors, bits_of(eps), rows, *self.box(rank), rank, 0, 0, 0]
        return Grid(
            program(AllReduceMhcKernel, config), parameters, ctas=clusters * config.cluster, threads=config.threads,
            cluster=config.cluster, shared_bytes=norm_bytes(config),
        )  # fmt: skip

    def fault(self, rank: int) -> list[int]:
        """What a rank recorded: kind, rank, rank waited for, generation, slot, word, microseconds."""
        return np.frombuffer(self.memory.bytes_at(self._faults[rank], 28), np.uint32).tolist()

    def assert_clean(self, calls: int, generation: int = 0) -> None:
        """Every word EMPTY, no fault, every rank behind the same call, and nobody still counted as arrived."""
        for rank in range(self.layout.world_size):
            words = np.frombuffer(self.memory.bytes_at(self._mailboxes[rank], self.layout.size_bytes), np.uint32)
            end = self.layout.faults_base // 4
            assert (words[:end] == EMPTY).all(), f"rank {rank}: {(words[:end] != EMPTY).sum()} dirty words"
            assert not words[end:].any()
            state = np.frombuffer(self.memory.bytes_at(self._states[rank], mailbox.STATE_WORDS * 4), np.uint32)
            assert state[mailbox.STATE_SLOT] == calls % mailbox.NUM_SLOTS
            assert state[mailbox.STATE_GENERATION] == (generation + calls) % 2**32
            assert state[mailbox.STATE_ARRIVED] == 0
            assert state[mailbox.STATE_BROKEN] == 0
