# SPDX-License-Identifier: Apache-2.0
"""A kernel's PTX as steps that can be run, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.emulator import accesses, barriers, warps
from tests.emulator.accesses import Step
from tests.emulator.arithmetic import bf16_unordered, function_of
from tests.emulator.names import Names, vector
from tests.emulator.ptx import Instruction, parse
from tests.emulator.threads import Threads
from tests.emulator.values import Array, halves, pair, size_of

# By the first parts of an opcode; everything else is arithmetic.
_STEPS: dict[str, Callable[[Names, Instruction, int], Step]] = {
    "ld": accesses.compile_load,
    "st.async": barriers.compile_store_async,
    "red.async": barriers.compile_store_async,
    "st": accesses.compile_store,
    "atom": accesses.compile_atomic,
    "red": accesses.compile_atomic,
    "cp.async": accesses.compile_copy,
    "shfl": warps.compile_shuffle,
    "vote": warps.compile_vote,
    "redux": warps.compile_reduction,
    "ldmatrix": warps.compile_load_matrices,
    "mma": warps.compile_matrix_multiply,
    "bar.warp": warps.compile_warp_barrier,
    "bar": barriers.compile_barrier,
    "barrier.cluster": barriers.compile_cluster_barrier,
    "mbarrier": barriers.compile_mbarrier,
    "mapa": barriers.compile_map_address,
    "griddepcontrol": barriers.compile_dependency,
}


class Program:
    """A kernel's PTX, ready to run.

    Raises:
        NotImplementedError: an instruction that the emulator does not know.
    """

    def __init__(self, ptx: str) -> None:
        (kernel,) = parse(ptx)
        self.names = Names(kernel)
        self.parameters = list(zip(kernel.parameters, kernel.parameter_bytes, strict=True))
        self.body = kernel.body
        self.joins = [bool(one.labels) for one in kernel.body]
        places = {label: at for at, one in enumerate(kernel.body) for label in one.labels}
        self.steps = [self._compile(one, at, places) for at, one in enumerate(kernel.body)]

    def _compile(self, one: Instruction, at: int, places: dict[str, int]) -> Step:
        names = self.names
        name = one.opcode.split(".")[0]
        if name == "bra":
            step: Step = _branch(places[one.operands[0]])
        elif name in ("ret", "exit"):
            step = _end
        elif name in ("fence", "membar"):
            step = _nothing
        else:
            prefixes = [prefix for prefix in _STEPS if one.opcode.startswith(prefix + ".")]
            step = (_STEPS[prefixes[0]] if prefixes else _compile_arithmetic)(names, one, at)
        if one.predicate is None:
            return step
        return _guarded(names, one, at, step)


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a kernel.

    Attributes:
        program: what it runs.
        parameters: of the GPU function, in order: a number's bits, or the bytes of a structure.
        grid: CTAs along x, y, z; clusters lie along x.
        threads: of a CTA.
        cluster: CTAs of a cluster.
        shared_bytes: dynamic shared memory of a CTA.
    """

    program: Program
    parameters: Sequence[int | bytes]
    grid: tuple[int, int, int]
    threads: int
    cluster: int = 1
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        assert len(self.parameters) == len(self.program.parameters), (len(self.parameters), self.program.parameters)
        assert self.grid[0] % self.cluster == 0, "a grid of whole clusters"

    def packed_parameters(self) -> Array:
        """The bytes that ld.param reads."""
        packed = b""
        for (_, size), value in zip(self.program.parameters, self.parameters, strict=True):
            packed += bytes(-len(packed) % min(size, 8))
            packed += value if isinstance(value, bytes) else (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return np.frombuffer(packed + bytes(-len(packed) % 8), np.uint8)


def _nothing(t: Threads, active: Array) -> Array:
    return active  # memory is sequentially consistent but for late words


def _end(t: Threads, active: Array) -> None:
    t.end(active)


def _branch(target: int) -> Step:
    def step(t: Threads, active: Array) -> Array:
        t.following = target
        return active

    return step


def _guarded(names: Names, one: Instruction, at: int, inner: Step) -> Step:
    """`@p`: where control may go different ways, threads part."""
    place, wanted = names.place(one.predicate or ""), not one.negated
    parts = one.opcode.startswith(("bra", "ret", "exit", "bar", "mbarrier.try_wait", "griddepcontrol.wait"))

    def guarded(t: Threads, active: Array) -> Array | None:
        on = active & (t.registers[place] == wanted)
        if not parts:
            inner(t, on)
            return active
        off = active & ~on
        if not on.any():
            return active
        if not off.any():
            return inner(t, on)
        t.pc[off] = at + 1
        go_on = inner(t, on)
        if go_on is not None:
            t.pc[go_on] = t.following
        return None

    return guarded


def _compile_arithmetic(names: Names, one: Instruction, at: int) -> Step:
    parts = one.opcode.split(".")
    if parts[0] == "mov" and "{" in "".join(one.operands):
        return _compile_split(names, one)
    if parts[0] == "setp" and parts[-1] == "bf16x2":
        return _compile_compare_pairs(names, one)
    kinds, function = function_of(parts, len(one.operands) - 1)
    sources = [names.source(text, kind) for text, kind in zip(one.operands[1:], kinds, strict=True)]
    write = names.write(one.operands[0])
    if len(sources) == 2:
        first, second = sources

        def step(t: Threads, active: Array) -> Array:
            registers = t.registers
            write(registers, function(first(registers), second(registers)), active)
            return active
    else:

        def step(t: Threads, active: Array) -> Array:
            write(t.registers, function(*(source(t.registers) for source in sources)), active)
            return active

    return step


def _compile_split(names: Names, one: Instruction) -> Step:
    """mov between a register and two halves of it."""
    target, source = one.operands
    bits = 8 * size_of(one.opcode.split(".")[-1])
    if target.startswith("{"):
        whole, writes = names.source(source, f"u{bits}"), [names.write(name) for name in vector(target)]

        def split(t: Threads, active: Array) -> Array:
            value = whole(t.registers)
            for i, write in enumerate(writes):
                write(t.registers, value >> value.dtype.type(i * bits // 2), active)
            return active

        return split
    low, high = (names.source(name, f"u{bits // 2}") for name in vector(source))
    write = names.write(target)

    def join(t: Threads, active: Array) -> Array:
        a, b = low(t.registers), high(t.registers)
        wide = pair(a, b) if bits == 32 else a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        write(t.registers, wide, active)
        return active

    return join


def _compile_compare_pairs(names: Names, one: Instruction) -> Step:
    """setp.bf16x2: a predicate for each half."""
    compare = one.opcode.split(".")[1]
    writes = [names.write(name) for name in one.operands[0].split("|")]
    a, b = (names.source(text, "b32") for text in one.operands[1:])

    def step(t: Threads, active: Array) -> Array:
        for write, x, y in zip(writes, halves(a(t.registers)), halves(b(t.registers)), strict=True):
            write(t.registers, bf16_unordered(compare, x, y), active)
        return active

    return step
