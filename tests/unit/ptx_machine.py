# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of a kernel on the CPU, thread by thread: what it computes, and that it touches nothing it may not.

Enough of PTX for the kernels of this library, and no more: an opcode it does not know is an error. Threads of all grids
that run together take turns in a random order, a few instructions each, so polls see other ranks' stores at any
moment. Memory is sequentially consistent and every kernel ends before the same rank's next one begins: this machine
tests arithmetic, addresses, protocols and barriers, not memory order and not programmatic dependent launch.
"""

from __future__ import annotations

import bisect
import math
import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WARP = 32
TURN_NS = 100_000  # by which the clock goes on when every thread has had a turn
SHARED_WINDOW = 24  # bits of an address within a CTA; the CTA's rank in its cluster stands above, plus one
Value = int
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


class Memory:
    """Global memory: allocations with guards between them. An access outside of one is an error."""

    def __init__(self) -> None:
        self._bytes = bytearray(256)
        self._starts: list[int] = []
        self._stops: list[int] = []

    def allocate(self, data: bytes) -> int:
        """A copy of `data`, aligned to 256 bytes; its address."""
        start = len(self._bytes)
        self._bytes += data + bytes(256 + -len(data) % 256)
        self._starts.append(start)
        self._stops.append(start + len(data))
        return start

    def read(self, addr: int, size: int) -> int:
        """`size` bytes, little-endian."""
        self._check(addr, size)
        return int.from_bytes(self._bytes[addr : addr + size], "little")

    def write(self, addr: int, size: int, value: int) -> None:
        """The low `size` bytes of `value`."""
        self._check(addr, size)
        self._bytes[addr : addr + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def bytes_at(self, addr: int, size: int) -> bytes:
        """A copy."""
        self._inside(addr, size)
        return bytes(self._bytes[addr : addr + size])

    def _check(self, addr: int, size: int) -> None:
        self._inside(addr, size)
        if addr % size:
            raise AssertionError(f"access to {size} bytes at {addr:#x}, which is not aligned")

    def _inside(self, addr: int, size: int) -> None:
        which = bisect.bisect_right(self._starts, addr) - 1
        if which < 0 or addr + size > self._stops[which]:
            raise AssertionError(f"access to {size} bytes at {addr:#x}, outside of every allocation")


@dataclass
class Cta:
    """A CTA: its shared memory and who waits at its barrier."""

    index: int
    shared: bytearray
    threads: list[Thread] = field(default_factory=list)
    cluster: list[Cta] = field(default_factory=list)
    mbarriers: dict[int, list[int]] = field(default_factory=dict)  # address -> arrivals, bytes awaited; phases complete


@dataclass
class Thread:
    """A thread: registers, where it is, and what it waits for."""

    lane: int
    index: int
    cta: Cta
    grid: Grid
    registers: dict[str, Value] = field(default_factory=dict)
    pc: int = 0
    waits: str = ""
    offer: tuple[Value, ...] = ()
    cluster_phase: int = 0
    done: bool = False


class Grid:
    """A launched kernel.

    Args:
        program: what to run.
        parameters: of the GPU function, in order; bits of a float.
        ctas: of the grid.
        threads: of a CTA.
        cluster: CTAs of a cluster.
        shared_bytes: dynamic shared memory of a CTA.
    """

    def __init__(
        self, program: Program, parameters: Sequence[int], *, ctas: int, threads: int, cluster: int = 1,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        assert len(parameters) == len(program.parameters), (len(parameters), len(program.parameters))
        assert ctas % cluster == 0
        self.program = program
        self.parameters = dict(zip(program.parameters, parameters, strict=True))
        self.num_ctas, self.num_threads, self.cluster = ctas, threads, cluster
        # Shared memory holds anything at first.
        self.ctas = [Cta(i, bytearray(b"\xa5" * shared_bytes)) for i in range(ctas)]
        for cta in self.ctas:
            first = cta.index // cluster * cluster
            cta.cluster = self.ctas[first : first + cluster]
            cta.threads = [Thread(i % WARP, i, cta, self) for i in range(threads)]
        self.threads = [thread for cta in self.ctas for thread in cta.threads]
        self.now_ns = 1


class Machine:
    """Runs grids together.

    Args:
        memory: global memory.
        seed: of the order in which threads take turns.
    """

    def __init__(self, memory: Memory, seed: int) -> None:
        self.memory = memory
        self._random = random.Random(seed)

    def run(self, grids: Sequence[Grid], limit: int = 60_000_000) -> None:
        """Until all have ended; AssertionError where nobody can go on, or after `limit` instructions."""
        self.run_chains([[grid] for grid in grids], limit)

    def run_chains(self, chains: Sequence[Sequence[Grid]], limit: int = 60_000_000, slow: int | None = None) -> None:
        """Runs chains beside each other: in each, a grid begins when the one before it has ended.

        Args:
            chains: one for each rank.
            limit: of instructions.
            slow: the chain that seldom gets a turn.
        """
        waiting = [list(chain) for chain in chains]
        running: list[list[Thread]] = [[] for _ in chains]
        now_ns = 0
        while any(waiting) or any(running):
            now_ns += TURN_NS
            turns = []
            for which, chain in enumerate(waiting):
                running[which] = [thread for thread in running[which] if not thread.done]
                if not running[which] and chain:
                    running[which] = list(chain.pop(0).threads)
                if which != slow or self._random.random() < 0.05 or not any(running[:which] + running[which + 1 :]):
                    turns += running[which]
            self._random.shuffle(turns)
            moved = 0
            for thread in turns:
                thread.grid.now_ns = now_ns
                moved += self._turn(thread, self._random.randrange(20, 400))
            limit -= moved
            stuck = [thread for threads in running for thread in threads if not thread.done]
            assert moved or slow is not None or not stuck, f"wait for ever: {sorted({one.waits for one in stuck})}"
            assert limit > 0, "no end: a rank that never publishes?"

    def _turn(self, thread: Thread, steps: int) -> int:
        if thread.waits and not _released(thread):
            return 0
        body, taken = thread.grid.program.body, 0
        while taken < steps and not thread.done and not thread.waits:
            step = body[thread.pc]
            thread.pc += 1
            taken += 1
            step(self, thread)
        return taken


def _released(thread: Thread) -> bool:
    """Whether what a thread waits for has come; lets everybody go who waits for the same."""
    kind = thread.waits.split()[0]
    if kind in ("shfl", "vote"):
        first = thread.index - thread.lane
        warp = thread.cta.threads[first : first + WARP]
        if any(other.waits != thread.waits for other in warp):
            return False
        offers = [other.offer for other in warp]
        for other in warp:
            chosen = offers[other.offer[1]][0] if kind == "shfl" else int(any(offer[0] for offer in offers))
            other.registers[other.waits.split()[2]] = chosen
            other.waits = ""
        return True
    if kind == "bar":
        if any(not other.done and other.waits != thread.waits for other in thread.cta.threads):
            return False
        for other in thread.cta.threads:
            other.waits = ""
        return True
    phases = [other.cluster_phase for cta in thread.cta.cluster for other in cta.threads if not other.done]
    if min(phases) < thread.cluster_phase:
        return False
    thread.waits = ""
    return True


Step = Callable[[Machine, Thread], None]


class Program:
    """A kernel's PTX, ready to run."""

    def __init__(self, ptx: str) -> None:
        from tests.unit.ptx_instructions import compile_step

        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)", text, flags=re.DOTALL)
        assert entry is not None
        self.parameters = re.findall(r"\.param\s+[^,]*?([\w$]+)\s*(?:,|$)", entry[2].strip())
        statements: list[tuple[str, str, str, str]] = []
        labels: dict[str, int] = {}
        for raw in text[text.index("{", entry.end()) :].split(";"):
            statement = raw.strip()
            while True:
                statement = statement.lstrip("{} \n\t") if not statement.startswith("{%") else statement
                label = re.match(r"([$\w]+):\s*", statement)
                if label is None:
                    break
                labels[label[1]] = len(statements)
                statement = statement[label.end() :]
            if statement and not statement.startswith("."):
                match = _STATEMENT.fullmatch(statement)
                assert match is not None, statement
                statements.append((match[1], match[2] or "", match[3], match[4]))
        statements.append(("", "", "ret", ""))
        self.body: list[Step] = [compile_step(*one, labels) for one in statements]


def bits_of(value: float) -> int:
    """The bits of an FP32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float_of(bits: int) -> float:
    """The FP32 of these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def round_f32(value: float) -> int:
    """The bits of the FP32 nearest to a float; overflow gives infinity, NaN the canonical one."""
    if math.isnan(value):
        return 0x7FFFFFFF
    try:
        return bits_of(value)
    except OverflowError:
        return bits_of(math.copysign(math.inf, value))
