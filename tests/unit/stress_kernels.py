# SPDX-License-Identifier: Apache-2.0
"""The stress harness's kernels in the emulator: memory with a rank's ledger, and launches of one kernel."""

from __future__ import annotations

import functools

import numpy as np
import torch

from nvcomm import jit
from stress import ledger
from stress.host_oracle import HostOracle
from stress.kernels.add_rows import AddRowsKernel
from stress.kernels.boundary_check import BoundaryCheckKernel
from stress.kernels.boundary_fill import BoundaryFillKernel
from stress.kernels.kernel import RankHandle, StressKernel
from stress.kernels.late import LateKernel
from stress.kernels.sum_turn import SumTurnKernel
from stress.kernels.turn import TurnKernel
from tests.emulator.machine import Machine
from tests.emulator.memory import Memory
from tests.emulator.program import Launch, Program
from tests.emulator.threads import WARP

RANKS, HIDDEN, RESERVED = 3, 64, 6000
REPLAY = 1_234_567
NOTHING = (0, 0, 0)
CTAS = 2


def kernels(ranks: int, hidden: int) -> dict[str, StressKernel]:
    return {
        "turn": TurnKernel(ranks),
        "late": LateKernel(),
        "sum_turn": SumTurnKernel(ranks),
        "add": AddRowsKernel(ranks),
        "fill": BoundaryFillKernel(hidden),
        "check": BoundaryCheckKernel(ranks, hidden, compare=True),
        "mix": BoundaryCheckKernel(ranks, hidden, compare=False),
    }


@functools.cache
def program(name: str) -> Program:
    kernel = kernels(RANKS, HIDDEN)[name]
    return Program(jit.artifacts(kernel, *kernel.fake_args(), arch="sm_90a").ptx)


def launch(name: str, work: tuple, handle: RankHandle, ctas: int = CTAS) -> Launch:
    """A launch of a kernel, as `StressKernel.__call__` makes it, but of whole warps."""
    kernel = kernels(RANKS, HIDDEN)[name]
    flat = [one for given in (*work, *handle) for one in (given if isinstance(given, tuple) else [given])]
    threads = max(kernel.threads, WARP)
    return Launch(program(name), flat, (ctas, 1, 1), threads, shared_bytes=kernel.shared_bytes or 0)


class Gpu:
    """One rank's memory; `replay` is what cell 0 of its ledger holds."""

    def __init__(self, seed: int, replay: int = REPLAY) -> None:
        self.oracle = HostOracle(seed, RANKS, RESERVED)
        self.memory = Memory(seed)
        self._machine = Machine(self.memory, seed)
        cells = np.zeros(ledger.LEDGER_WORDS, np.uint32)
        cells[0] = replay
        self.ledger = self.memory.allocate(cells.tobytes())

    def put(self, tensor: torch.Tensor) -> int:
        return self.memory.allocate(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def room(self, num_bytes: int) -> int:
        return self.memory.allocate(bytes(num_bytes))

    def get(self, addr: int, like: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.memory.bytes_at(addr, like.nbytes)), dtype=like.dtype).view(like.shape)

    def launch(self, kernel: str, work: tuple, *, rank: int = 0, x: int = 0, out: int = 0, stride: int = 0) -> None:
        """Runs it; `stride`: bytes from one input, and from one output, to the next."""
        handle = RankHandle(x, stride, out, stride, self.ledger, self.oracle.seed_key, RESERVED, rank)
        self._machine.run([[launch(kernel, work, handle)]])

    def cells(self) -> list[int]:
        return np.frombuffer(self.memory.bytes_at(self.ledger, 4 * ledger.LEDGER_WORDS), np.uint32).tolist()

    def reading(self) -> ledger.LedgerReading:
        """The ledger, of which wrong words are forgotten afterwards."""
        words = self.cells()
        self.memory.write(self.ledger + 4 * ledger.LOCK, 4, 0)
        self.memory.write(self.ledger + 4 * ledger.BAD_WORDS, 4, 0)
        return ledger.read(words)
