# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emulator.names import Names, vector
from tests.emulator.ptx import Instruction
from tests.emulator.threads import Threads
from tests.emulator.values import UNSIGNED, Array, size_of

Step = Callable[[Threads, Array], Array | None]


def compile_load(names: Names, one: Instruction, at: int) -> Step:
    """ld: of parameters, global or shared memory."""
    parts = one.opcode.split(".")
    address, size, targets = names.address(one.operands[1]), size_of(parts[-1]), vector(one.operands[0])
    count, dtype = len(targets), UNSIGNED[size]
    places = [names.place(name) for name in targets]
    if "param" in parts:

        def load(t: Threads, threads: Array) -> Array:
            start = address(t.registers)[threads].astype(np.int64)
            assert (start % size == 0).all(), "misaligned parameter"
            return t.parameters.view(dtype)[t.launch[threads, None], start[:, None] // size + np.arange(count)]

    elif _space(parts) == "shared":

        def load(t: Threads, threads: Array) -> Array:
            return t.shared_as(size)[t.shared_places(address(t.registers)[threads], threads, size, count)]

    else:

        def load(t: Threads, threads: Array) -> Array:
            return t.memory.load(address(t.registers)[threads], size, count)

    def step(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        if threads.size:
            for i, values in zip(places, load(t, threads).T, strict=True):
                t.registers[i][threads] = values
        return active

    return step


def compile_store(names: Names, one: Instruction, at: int) -> Step:
    """st, but for st.async."""
    parts = one.opcode.split(".")
    address, size = names.address(one.operands[0]), size_of(parts[-1])
    read = values_of(names, one.operands[1], size)
    shared = _space(parts) == "shared"

    def step(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        if threads.size:
            addr, values = address(t.registers)[threads], read(t, threads)
            if shared:
                t.shared_as(size)[t.shared_places(addr, threads, size, values.shape[1])] = values
            else:
                t.memory.store(addr, values)
        return active

    return step


def values_of(names: Names, text: str, size: int) -> Callable[[Threads, Array], Array]:
    """A function that reads a vector operand: (threads, elements) unsigned numbers of `size` bytes."""
    sources = [names.source(name, f"b{8 * size}") for name in vector(text)]

    def read(t: Threads, threads: Array) -> Array:
        columns = [source(t.registers) for source in sources]
        return np.stack([one[threads] if one.ndim else np.full(len(threads), one) for one in columns], axis=1)

    return read


def compile_atomic(names: Names, one: Instruction, at: int) -> Step:
    """atom and red: threads one after the other, in a random order."""
    parts = one.opcode.split(".")
    size, signed = size_of(parts[-1]), parts[-1].startswith("s")
    operation = next(part for part in parts if part in ("add", "max", "cas"))
    out = names.place(one.operands[0]) if parts[0] == "atom" else None
    rest = one.operands[1:] if parts[0] == "atom" else one.operands
    address = names.address(rest[0])
    given = [values_of(names, text, size) for text in rest[1:]]
    shared = _space(parts) == "shared"
    assert not signed, one
    mask = (1 << 8 * size) - 1

    def apply(old: int, a: int, b: int) -> int:
        if operation == "add":
            return (old + a) & mask
        return max(old, a) if operation == "max" else b if old == a else old

    def step(t: Threads, active: Array) -> Array:
        threads = t.random.permutation(np.flatnonzero(active))
        if not threads.size:
            return active
        addr = address(t.registers)[threads]
        a, b = (read(t, threads)[:, 0].tolist() for read in (given * 2)[:2])
        places = t.shared_places(addr, threads, size)[:, 0] if shared else addr
        # Each place once: what it held, then what each thread makes of it.
        kinds, which = np.unique(places, return_inverse=True)
        held = (t.shared_as(size)[kinds] if shared else t.memory.load(kinds, size)[:, 0]).tolist()
        old = []
        for i, x, y in zip(which.tolist(), a, b, strict=True):
            old.append(held[i])
            held[i] = apply(held[i], x, y)
        new = np.array(held, UNSIGNED[size])
        if shared:
            t.shared_as(size)[kinds] = new
        else:
            t.memory.store(kinds, new[:, None])
        if out is not None:
            t.registers[out][threads] = np.array(old, UNSIGNED[size])
        return active

    return step


def compile_copy(names: Names, one: Instruction, at: int) -> Step:
    """cp.async: data is read at once, and lies in shared memory when its thread has waited for its group."""
    kind = one.opcode.split(".")[2]
    if kind == "commit_group":

        def commit(t: Threads, active: Array) -> Array:
            t.committed[active] += 1
            return active

        return commit
    if kind == "wait_group":
        allowed = int(one.operands[0])
        return lambda t, active: _wait_for_copies(t, active, allowed)
    target, source = names.address(one.operands[0]), names.address(one.operands[1])
    size = int(one.operands[2])
    taken = names.source(one.operands[3] if len(one.operands) > 3 else one.operands[2], "u32")
    unit = min(size, 8)

    def copy(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        if threads.size:
            count = np.broadcast_to(taken(t.registers), active.shape)[threads]
            assert np.isin(count, (0, size)).all(), "a cp.async of a part"
            places = t.shared_places(target(t.registers)[threads], threads, unit, size // unit)
            raw = np.zeros(places.shape, UNSIGNED[unit])
            read = count == size
            raw[read] = t.memory.load(source(t.registers)[threads][read], unit, size // unit)
            t.copies.append((threads, places, raw, t.committed[threads]))
        return active

    return copy


def _wait_for_copies(t: Threads, active: Array, allowed: int) -> Array:
    left = []
    for threads, places, raw, group in t.copies:
        now = active[threads] & (group < t.committed[threads] - allowed)
        t.shared_as(raw.itemsize)[places[now]] = raw[now]
        if not now.all():
            left.append((threads[~now], places[~now], raw[~now], group[~now]))
    t.copies = left
    return active


def _space(parts: list[str]) -> str:
    return "shared" if any(part.startswith("shared") for part in parts) else "global"
