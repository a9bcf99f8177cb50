# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of matrix kernels on the CPU, a cluster at a time, all its threads in step as numpy arrays.

For what `ptx_machine` is too slow for: warps that multiply matrices. It knows the opcodes of the sparse MLA kernel, and
an opcode that it does not know is an error. What it checks beside the result: every access lies inside of an
allocation or of shared memory, a barrier that nobody completes ends the run, shared memory is NaN until written, and a
cp.async writes only when its thread waits for it. It tests no memory order, no races and no speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WARP = 32
WINDOW = 24  # bits of a shared address within its CTA; above it the CTA's rank in the cluster, plus one
SHARED_BASE = 1024
POISON = 0xFFFFFFFFFFFFFFFF  # what a register holds before it is written
STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


class Memory:
    """Global memory: allocations with guards between them."""

    def __init__(self) -> None:
        self.data = np.zeros(1 << 16, np.uint8)
        self.inside = np.zeros(1 << 16, bool)

    def allocate(self, content: np.ndarray) -> int:
        """A copy of `content`; its address."""
        start = len(self.data)
        raw = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        padding = 512 - len(raw) % 256
        self.data = np.concatenate([self.data, raw, np.zeros(padding, np.uint8)])
        self.inside = np.concatenate([self.inside, np.ones(len(raw), bool), np.zeros(padding, bool)])
        return start

    def places(self, addr: np.ndarray, size: int) -> np.ndarray:
        """(threads, size) indices of bytes."""
        assert not (addr % size).any(), f"an access to {size} bytes is not aligned"
        places = addr.astype(np.int64)[:, None] + np.arange(size)
        assert (places < len(self.data)).all(), "an access beyond every allocation"
        assert self.inside[places].all(), f"an access to {size} bytes outside of every allocation"
        return places


@dataclass
class Statement:
    """One instruction: predicate (name, negated), opcode, operands."""

    predicate: str
    negated: bool
    opcode: str
    operands: list[str]


class Program:
    """A kernel's PTX, in pieces."""

    def __init__(self, ptx: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)", text, flags=re.DOTALL)
        self.parameters = re.findall(r"\.param\s+[^,]*?([\w$]+)\s*(?:,|$)", entry[2].strip())
        self.body: list[Statement] = []
        self.labels: dict[str, list[int]] = {}
        for raw in text[text.index("{", entry.end()) :].split(";"):
            statement = raw.strip()
            while True:
                statement = statement if statement.startswith("{%") else statement.lstrip("{} \n\t")
                label = re.match(r"([$\w]+):\s*", statement)
                if label is None:
                    break
                self.labels.setdefault(label[1], []).append(len(self.body))
                statement = statement[label.end() :]
            if statement and not statement.startswith("."):
                match = STATEMENT.fullmatch(statement)
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[4])
                self.body.append(Statement(match[2] or "", match[1] == "!", match[3], operands))


@dataclass
class Cluster:
    """A cluster under way. All arrays have an entry for each thread.

    Attributes:
        program: what it runs.
        memory: global memory.
        parameters: name -> bits, in order. The address of parameter i is 8 i, in a space of its own.
        special: name -> values, such as "%tid.x".
        num_ctas: of the cluster.
        threads: of a CTA.
        shared: (num_ctas, bytes).
    """

    program: Program
    memory: Memory
    parameters: dict[str, int]
    special: dict[str, np.ndarray]
    num_ctas: int
    threads: int
    shared: np.ndarray
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    mbarriers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.num_ctas * self.threads
        self.cta = np.arange(count) // self.threads
        self.pc = np.zeros(count, np.int64)
        self.done = np.zeros(count, bool)
        self.barrier = np.full(count, -1)
        self.arrived = np.zeros(count, int)
        self.in_cluster_wait = np.zeros(count, bool)
        self.polling = np.zeros(count, bool)
        self.changes = 0

    def run(self) -> None:
        """Until all threads have ended."""
        from tests.unit.ptx_warp_instructions import execute

        seen = -1
        while not self.done.all():
            ready = ~self.done & (self.barrier < 0) & ~self.in_cluster_wait
            assert ready.any(), "every thread waits at a barrier that nobody completes"
            if not (ready & ~self.polling).any():
                # All that can run polls an mbarrier: once more, if anything happened to one since the last time.
                assert self.changes > seen, "every thread polls an mbarrier that nobody completes"
                seen = self.changes
                self.polling[:] = False
            self._step(ready & ~self.polling, execute)

    def _step(self, ready: np.ndarray, execute) -> None:
        pc = int(self.pc[ready].min())
        chosen = ready & (self.pc == pc)
        if pc == len(self.program.body):
            self.done |= chosen
            return
        statement = self.program.body[pc]
        self.pc[chosen] = pc + 1
        active = chosen
        if statement.predicate:
            active = chosen & (self.registers[statement.predicate] != statement.negated)
        if active.any():
            execute(self, statement, active, pc)

    # Registers hold the bits as uint64; predicates are bool.
    def value(self, operand: str) -> np.ndarray:
        """Bits of an operand for every thread."""
        count = len(self.cta)
        if operand in self.special:
            return self.special[operand]
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("%"):  # a load that no thread needed
            return np.full(count, POISON, np.uint64)
        if operand.startswith("0f"):
            return np.full(count, int(operand[2:], 16), np.uint64)
        if operand in self.parameters:
            return np.full(count, 8 * list(self.parameters).index(operand), np.uint64)
        if operand.startswith("__"):
            return np.full(count, SHARED_BASE, np.uint64)
        return np.full(count, int(operand, 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def store(self, operand: str, bits: np.ndarray, active: np.ndarray) -> None:
        """Sets a register of the active threads."""
        if operand == "_":
            return
        if operand not in self.registers:
            self.registers[operand] = np.full(len(self.cta), POISON, np.uint64).astype(bits.dtype)
        self.registers[operand][active] = bits[active]

    def address(self, operand: str) -> np.ndarray:
        """Of `[register + offset]`."""
        name, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        return self.value(name) + np.uint64(int(offset or 0))

    def shared_places(self, addr: np.ndarray, active: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """CTA and (threads, size) byte offsets of the active threads' shared addresses."""
        addr, own = addr[active].astype(np.int64), self.cta[active]
        rank = addr >> WINDOW
        cta = np.where(rank > 0, rank - 1, own)
        offset = (addr & ((1 << WINDOW) - 1)) - SHARED_BASE
        assert not (offset % size).any(), f"a shared access to {size} bytes is not aligned"
        assert ((offset >= 0) & (offset + size <= self.shared.shape[1])).all(), "a shared access out of bounds"
        return cta, offset[:, None] + np.arange(size)

    def mbarrier(self, addr: int, cta: int) -> list[int]:
        """Pending arrivals and bytes of one mbarrier."""
        rank = addr >> WINDOW
        return self.mbarriers[(rank - 1 if rank else cta), addr & ((1 << WINDOW) - 1)]


def launch(
    program: Program, memory: Memory, parameters: Sequence[int], grid: tuple[int, int, int], cluster: int, threads: int,
    shared_bytes: int,
) -> None:  # fmt: skip
    """Runs a grid, clusters along x, one after the other."""
    assert len(parameters) == len(program.parameters), (len(parameters), program.parameters)
    named = dict(zip(program.parameters, parameters, strict=True))
    count = cluster * threads
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for first in range(0, grid[0], cluster):
                    special = {
                        "%tid.x": np.arange(count, dtype=np.uint64) % threads,
                        "%ctaid.x": np.arange(count, dtype=np.uint64) // threads + np.uint64(first),
                        "%ctaid.y": np.full(count, y, np.uint64),
                        "%ctaid.z": np.full(count, z, np.uint64),
                    }
                    shared = np.full((cluster, shared_bytes), 0xFF, np.uint8)
                    Cluster(program, memory, named, special, cluster, threads, shared).run()
