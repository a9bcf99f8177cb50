# SPDX-License-Identifier: Apache-2.0
"""All-gather kernels on the CPU, from their PTX, with what hardware does to a mailbox added to `ptx_machine`.

- Words arrive late: whatever is published into a mailbox lands word by word, in any order, some of it when the call is
  over, the sender's own copy included. Only stores to one address stay in order. Clears land at once.
- Calls follow each other without a pause: every rank has a chain of launches, and one rank may be several calls behind.
- Programmatic dependent launch: a launch begins when every CTA of the one before has triggered or ended, and
  `griddepcontrol.wait` waits for its end.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from nvcomm import jit
from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
from nvcomm.mailbox import EMPTY, MailboxLayout
from tests.unit import ptx_instructions
from tests.unit.kernel_world import Ranks
from tests.unit.ptx_machine import WARP, Grid, Machine, Memory, Program, Thread


class LateMemory(Memory):
    """Publishes land later; see the module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._late: list[tuple[int, int]] = []
        self._flying: list[tuple[int, int]] = []

    def arrives_late(self, start: int, size: int) -> None:
        """From now on, in this range."""
        self._late.append((start, start + size))

    def write(self, addr: int, size: int, value: int) -> None:
        """See `Memory.write`."""
        self._check(addr, size)
        if value == EMPTY or not any(start <= addr < stop for start, stop in self._late):
            super().write(addr, size, value)
        else:
            assert size == 4, "a mailbox is written in whole words"
            self._flying.append((addr, value))

    def read(self, addr: int, size: int) -> int:
        """See `Memory.read`. Time passes with every read."""
        if self._flying and self._random.random() < 0.3:
            self._land(self._random.choice(self._flying)[0])
        return super().read(addr, size)

    def drain(self) -> None:
        """Everything lands."""
        while self._flying:
            self._land(self._flying[0][0])

    def _land(self, addr: int) -> None:
        """The oldest store to `addr`."""
        index = next(i for i, (other, _) in enumerate(self._flying) if other == addr)
        super().write(addr, 4, self._flying.pop(index)[1])


class Launch(Grid):
    """A grid with a place in a rank's chain."""

    def __init__(self, program: Program, parameters: Sequence[int], *, ctas: int, threads: int) -> None:
        super().__init__(program, parameters, ctas=ctas, threads=threads)
        self.previous: Launch | None = None
        self.triggered: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether all of its threads have ended."""
        return all(thread.done for thread in self.threads)

    @property
    def lets_dependents_begin(self) -> bool:
        """Whether every CTA has triggered or ended."""
        return all(cta.index in self.triggered or all(t.done for t in cta.threads) for cta in self.ctas)


class ChainMachine(Machine):
    """Runs a chain of launches for each rank."""

    def run_launches(self, chains: Sequence[Sequence[Launch]], late: Mapping[int, int], limit: int = 5_000_000) -> None:
        """Until all have ended.

        Args:
            chains: each rank's launches.
            late: chain -> rounds that it begins later than the others.
            limit: of instructions.
        """
        for chain in chains:
            for previous, launch in zip(chain, chain[1:], strict=False):
                launch.previous = previous
        waiting = [list(chain) for chain in chains]
        running: list[Launch] = []
        rounds = 0
        while any(waiting) or running:
            rounds += 1
            for which, chain in enumerate(waiting):
                if chain and rounds > late.get(which, 0):
                    before = chain[0].previous
                    if before is None or before.done or (before in running and before.lets_dependents_begin):
                        running.append(chain.pop(0))
            live = [thread for launch in running for thread in launch.threads if not thread.done]
            self._random.shuffle(live)
            for launch in running:
                launch.now_ns += 1000
            for thread in live:
                limit -= self._turn(thread, self._random.randrange(20, 400))
            assert limit > 0, "no end: a rank that never publishes?"
            running = [launch for launch in running if not launch.done]

    def _turn(self, thread: Thread, steps: int) -> int:
        if thread.waits == "pdl":
            previous = thread.grid.previous if isinstance(thread.grid, Launch) else None
            if previous is not None and not previous.done:
                return 1
            thread.waits = ""
        if thread.waits.startswith("warp"):
            first = thread.index - thread.lane
            warp = thread.cta.threads[first : first + WARP]
            if any(other.waits != thread.waits for other in warp):
                return 1
            for other in warp:
                other.waits = ""
        return super()._turn(thread, steps)


def _wait(machine: Machine, thread: Thread) -> None:
    thread.waits = "pdl"


def _warp_barrier(machine: Machine, thread: Thread) -> None:
    thread.waits = f"warp {thread.pc}"


def _trigger(machine: Machine, thread: Thread) -> None:
    assert isinstance(thread.grid, Launch)
    thread.grid.triggered.add(thread.cta.index)


STEPS = {
    "griddepcontrol.wait": _wait,
    "griddepcontrol.launch_dependents": _trigger,
    "bar.warp.sync": _warp_barrier,  # escape records are read by a warp together, then cleared
}


@functools.cache
def program(config: AllGatherConfig) -> Program:
    """The all-gather's PTX, compiled once, with both halves of programmatic dependent launch."""
    compiled = ptx_instructions._compile

    def compile_one(opcode: str, operands: list[str], labels: Mapping[str, int]) -> Any:
        return STEPS[opcode] if opcode in STEPS else compiled(opcode, operands, labels)

    with mock.patch.object(ptx_instructions, "_compile", compile_one):
        kernel = AllGatherKernel(config)
        return Program(jit.artifacts(kernel, *kernel.fake_args(), arch="sm_90a").ptx)


class GatherRanks(Ranks):
    """Ranks whose mailboxes words reach late, if asked for."""

    def __init__(self, layout: MailboxLayout, seed: int, *, late: bool = True, **options: int) -> None:
        super().__init__(layout, seed, **options)
        memory = LateMemory(seed)
        memory.__dict__.update(self.memory.__dict__)
        self.memory = self.late_memory = memory
        self.machine = ChainMachine(memory, seed)
        if late:
            for mailbox in self._mailboxes:
                memory.arrives_late(mailbox, layout.faults_base)

    def launch(
        self, config: AllGatherConfig, rank: int, inp: int, out: int, num_bytes: int, call: tuple[int, int, int],
        ctas: int = 1,
    ) -> Launch:  # fmt: skip
        """A gather of one rank; `call` as `nvcomm.handle.Call` has it: site, kind, tag."""
        parameters = [inp, out, num_bytes, *self.box(rank), rank, *call]
        return Launch(program(config), parameters, ctas=ctas, threads=config.threads)

    def run_launches(self, chains: Sequence[Sequence[Launch]], late: Mapping[int, int] | None = None) -> None:
        """Runs a chain of launches for each rank that has one, and lets everything land."""
        self.machine.run_launches(chains, late or {})
        self.late_memory.drain()
