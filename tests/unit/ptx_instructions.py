# SPDX-License-Identifier: Apache-2.0
"""PTX instructions for `ptx_machine`: each becomes a function of the machine and a thread. Registers hold bits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from tests.unit.ptx_machine import SHARED_WINDOW, Cta, Machine, Step, Thread, float_of, round_f32

Get = Callable[[Thread], int]
_SIZES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8}
_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_PREDICATE: dict[str, Callable[..., int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: 1 - a,
    "mov": lambda a: a,
}
_NOTHING = ("griddepcontrol.", "fence.", "cp.async.commit_group", "cp.async.wait_group", "membar")


def compile_step(negate: str, predicate: str, opcode: str, rest: str, labels: Mapping[str, int]) -> Step:
    """One instruction; `@p` and `@!p` included."""
    step = _compile(opcode, _operands(rest), labels)
    if not predicate:
        return step
    wanted = not negate

    def guarded(machine: Machine, thread: Thread) -> None:
        if bool(thread.registers[predicate]) == wanted:
            step(machine, thread)

    return guarded


def _compile(opcode: str, operands: list[str], labels: Mapping[str, int]) -> Step:
    parts = opcode.split(".")
    name = parts[0]
    if opcode.startswith(_NOTHING):
        return lambda machine, thread: None
    if name in ("ret", "exit"):
        return _ret
    if name == "bra":
        target = labels[operands[0]]
        return lambda machine, thread: setattr(thread, "pc", target)
    if name == "mbarrier":
        return _mbarrier(parts, operands)
    if opcode.startswith("st.async"):
        return _store_async(operands)
    if name in ("ld", "st", "atom", "red", "cp"):
        return _memory(parts, operands)
    if name == "shfl":
        return _shuffle(parts[2], operands)
    if name == "vote":
        return _vote(parts, operands)
    if name == "bar" and parts[1] == "warp":
        return lambda machine, thread: None  # reconvergence: threads here take turns in any order anyway
    if name == "bar":
        return lambda machine, thread: setattr(thread, "waits", "bar")
    if name == "barrier":
        return _cluster_arrive if parts[2] == "arrive" else _cluster_wait
    if name == "mov" and operands[0].startswith("{"):
        return _unpack(operands, parts[-1])
    return _arithmetic(parts, operands)


def _ret(machine: Machine, thread: Thread) -> None:
    thread.done = True


def _cluster_arrive(machine: Machine, thread: Thread) -> None:
    thread.cluster_phase += 1


def _cluster_wait(machine: Machine, thread: Thread) -> None:
    thread.waits = "cluster"


def _mbarrier(parts: list[str], operands: list[str]) -> Step:
    if parts[1] == "init":
        address, count = _address(operands[0]), _get(operands[1], "b32")
        return lambda machine, thread: thread.cta.mbarriers.update({address(thread): [count(thread), 0, 0]})
    address, value = _address(operands[1]), _get(operands[2], "b32")
    if parts[1] == "arrive":
        return lambda machine, thread: _settle(thread.cta, address(thread), 1, value(thread))
    assert parts[1] == "try_wait", parts

    def step(machine: Machine, thread: Thread) -> None:
        thread.registers[operands[0]] = int(thread.cta.mbarriers[address(thread)][2] & 1 != value(thread))

    return step


def _settle(cta: Cta, mbarrier: int, arrived: int, expected: int) -> None:
    """An arrival, or bytes that are expected (or have come: below 0); all of either: the phase is complete."""
    state = cta.mbarriers[mbarrier]
    state[0] -= arrived
    state[1] += expected
    if state[:2] == [0, 0]:
        state[:] = [1, 0, state[2] + 1]


def _store_async(operands: list[str]) -> Step:
    address, value, mbarrier = _address(operands[0]), _get(operands[1], "b32"), _address(operands[2])

    def step(machine: Machine, thread: Thread) -> None:
        _write(machine, thread, address(thread), 4, value(thread), shared=True)
        at = mbarrier(thread)
        _settle(thread.cta.cluster[(at >> SHARED_WINDOW) - 1], at & ((1 << SHARED_WINDOW) - 1), 0, -4)

    return step


def _shuffle(mode: str, operands: list[str]) -> Step:
    out, value, which = operands[0].split("|")[0], _get(operands[1], "b32"), _get(operands[2], "b32")

    def step(machine: Machine, thread: Thread) -> None:
        lane = which(thread) if mode == "idx" else thread.lane ^ which(thread)
        thread.offer = (value(thread), lane % 32)
        thread.waits = f"shfl {thread.pc} {out}"

    return step


def _vote(parts: list[str], operands: list[str]) -> Step:
    assert parts[2:] == ["any", "pred"], parts
    value = _get(operands[1], "pred")

    def step(machine: Machine, thread: Thread) -> None:
        thread.offer = (value(thread), 0)
        thread.waits = f"vote {thread.pc} {operands[0]}"

    return step


def _memory(parts: list[str], operands: list[str]) -> Step:
    kind = parts[-1]
    vector = next((int(part[1]) for part in parts if re.fullmatch(r"v[24]", part)), 1)
    if parts[0] == "cp":
        return _copy(operands)
    if parts[0] in ("atom", "red"):
        return _atomic(parts, operands)
    size = _SIZES[kind]
    bracket = next(text for text in operands if text.startswith("["))
    values = next(text for text in operands if not text.startswith("["))
    names = [one.strip() for one in values.strip("{}").split(",")]
    assert len(names) == vector
    if "param" in parts:
        parameter = re.split(r"[+\s\]]", bracket[1:])[0]
        return lambda machine, thread: thread.registers.__setitem__(names[0], thread.grid.parameters[parameter])
    address = _address(bracket)
    shared = any(part.startswith("shared") for part in parts)
    if parts[0] == "ld":

        def load(machine: Machine, thread: Thread) -> None:
            at = address(thread)
            if vector * size == 16:
                assert at % 16 == 0, f"16 bytes at {at:#x}"
            for i, name in enumerate(names):
                thread.registers[name] = _read(machine, thread, at + i * size, size, shared=shared)

        return load
    sources = [_get(name, kind) for name in names]

    def store(machine: Machine, thread: Thread) -> None:
        at = address(thread)
        if vector * size == 16:
            assert at % 16 == 0, f"16 bytes at {at:#x}"
        for i, source in enumerate(sources):
            _write(machine, thread, at + i * size, size, source(thread), shared=shared)

    return store


def _read(machine: Machine, thread: Thread, addr: int, size: int, *, shared: bool) -> int:
    if not shared:
        return machine.memory.read(addr, size)
    memory, at = _shared(thread, addr, size)
    return int.from_bytes(memory[at : at + size], "little")


def _write(machine: Machine, thread: Thread, addr: int, size: int, value: int, *, shared: bool) -> None:
    if not shared:
        machine.memory.write(addr, size, value)
        return
    memory, at = _shared(thread, addr, size)
    memory[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _shared(thread: Thread, addr: int, size: int) -> tuple[bytearray, int]:
    rank, at = addr >> SHARED_WINDOW, addr & ((1 << SHARED_WINDOW) - 1)
    cta = thread.cta if rank == 0 else thread.cta.cluster[rank - 1]
    assert at + size <= len(cta.shared), f"shared access to {size} bytes at {at}"
    return cta.shared, at


def _copy(operands: list[str]) -> Step:
    target, source, count = _address(operands[0]), _address(operands[1]), _get(operands[3], "b32")
    whole = int(operands[2])

    def step(machine: Machine, thread: Thread) -> None:
        taken = count(thread)
        data = machine.memory.read(source(thread), taken) if taken else 0
        _write(machine, thread, target(thread), whole, data, shared=True)

    return step


def _atomic(parts: list[str], operands: list[str]) -> Step:
    size = _SIZES[parts[-1]]
    operation = next(part for part in parts if part in ("add", "max", "cas"))
    out = operands[0] if parts[0] == "atom" else None
    rest = operands[1:] if out else operands
    address, values = _address(rest[0]), [_get(text, parts[-1]) for text in rest[1:]]

    def step(machine: Machine, thread: Thread) -> None:
        at = address(thread)
        old = machine.memory.read(at, size)
        given = [value(thread) for value in values]
        new = {"add": lambda: old + given[0], "max": lambda: max(old, given[0])}.get(
            operation, lambda: given[1] if old == given[0] else old
        )()
        machine.memory.write(at, size, new)
        if out:
            thread.registers[out] = old

    return step


def _unpack(operands: list[str], kind: str) -> Step:
    low, high = (name.strip() for name in operands[0].strip("{}").split(","))
    source, half = _get(operands[1], kind), _SIZES[kind] * 4

    def step(machine: Machine, thread: Thread) -> None:
        value = source(thread)
        thread.registers[low] = value & ((1 << half) - 1)
        thread.registers[high] = value >> half

    return step


def _arithmetic(parts: list[str], operands: list[str]) -> Step:
    out, function = operands[0], _function(parts)
    sources = [_get(text, kind) for text, kind in zip(operands[1:], _kinds(parts, len(operands) - 1), strict=True)]

    def step(machine: Machine, thread: Thread) -> None:
        thread.registers[out] = function(*(source(thread) for source in sources))

    return step


def _kinds(parts: list[str], count: int) -> list[str]:
    """How each source operand is read."""
    kind = parts[-1]
    if parts[0] == "selp":
        return [kind, kind, "pred"]
    if parts[0] in ("shl", "shr"):
        return [kind, "u32"]
    if parts[0] == "mad" and parts[1] == "wide":
        return [kind, kind, {"s32": "s64", "u32": "u64"}[kind]]
    if parts[0] == "mapa":
        return ["u32", "u32"]
    return [kind] * count


def _function(parts: list[str]) -> Callable[..., int]:
    name, kind = parts[0], parts[-1]
    if kind == "pred":
        return _PREDICATE[name]
    if name == "setp":
        return lambda a, b: int(_COMPARE[parts[1]](a, b))
    if name == "cvt":
        return _convert(parts)
    if name == "mapa":
        return lambda addr, rank: (addr & ((1 << SHARED_WINDOW) - 1)) | (rank + 1) << SHARED_WINDOW
    if kind == "f32" and name not in ("mov", "selp"):
        return _FLOAT[name]
    bits = 8 * _SIZES[kind]
    mask = (1 << bits) - 1
    if name == "mul" and parts[1] == "wide":
        return lambda a, b: a * b & ((1 << 2 * bits) - 1)
    if name == "mad" and parts[1] == "wide":
        return lambda a, b, c: a * b + c & ((1 << 2 * bits) - 1)
    if name == "mul" and parts[1] == "hi":
        return lambda a, b: (a * b >> bits) & mask
    whole: dict[str, Callable[..., int]] = {
        "mov": lambda a: a,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "mad": lambda a, b, c: a * b + c,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "neg": lambda a: -a,
        "shl": lambda a, b: a << min(b, bits),
        "shr": lambda a, b: a >> min(b, bits),
        "selp": lambda a, b, p: a if p else b,
    }
    inner = whole[name]
    return lambda *given: inner(*given) & mask


def _add(a: int, b: int) -> int:
    return round_f32(float_of(a) + float_of(b))  # exact in double, or rounded there first: harmless at 53 bits


def _multiply(a: int, b: int) -> int:
    return round_f32(float_of(a) * float_of(b))  # exact in double


def _fma(a: int, b: int, c: int) -> int:
    product, addend = float_of(a) * float_of(b), float_of(c)
    total = product + addend
    if not math.isfinite(total):
        return round_f32(total)
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    if error and not int.from_bytes(np.float64(total).tobytes(), "little") & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))  # round to odd
    return round_f32(total)


def _rsqrt(a: int) -> int:
    value = float_of(a)
    return round_f32(math.inf if value == 0 else math.nan if not value > 0 else 1 / math.sqrt(value))


_FLOAT: dict[str, Callable[..., int]] = {"add": _add, "mul": _multiply, "fma": _fma, "rsqrt": _rsqrt}


def _convert(parts: list[str]) -> Callable[..., int]:
    to, source = parts[-2], parts[-1]
    if parts[1:3] == ["rn", "bf16x2"]:
        return lambda high, low: _bf16(high) << 16 | _bf16(low)
    if parts[1:3] == ["rn", "f16x2"]:
        return lambda high, low: _f16(high) << 16 | _f16(low)
    if (to, source) == ("f32", "f16"):
        return lambda half: round_f32(float(np.uint16(half).view(np.float16)))
    if to == "f32" and source in ("s32", "u32"):
        return lambda value: round_f32(float(value))
    if "f32" in (to, source):
        raise AssertionError(f"{'.'.join(parts)} is not known")
    mask = (1 << 8 * _SIZES[to]) - 1
    return lambda value: value & mask


def _bf16(bits: int) -> int:
    if math.isnan(float_of(bits)):
        return 0x7FFF
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _f16(bits: int) -> int:
    if math.isnan(float_of(bits)):
        return 0x7FFF
    with np.errstate(over="ignore"):
        return int(np.float32(float_of(bits)).astype(np.float16).view(np.uint16))


def _get(text: str, kind: str) -> Get:
    """Reads an operand as `kind`: signed kinds are sign-extended."""
    raw = _raw(text)
    if kind.startswith("s"):
        bits = 8 * _SIZES[kind]
        half = 1 << bits - 1

        def signed(thread: Thread) -> int:
            return ((raw(thread) + half) & ((1 << bits) - 1)) - half

        return signed
    if kind == "pred":
        return raw
    size = _SIZES.get(kind, 8)
    mask = (1 << 8 * size) - 1
    return lambda thread: raw(thread) & mask


def _raw(text: str) -> Get:
    special: dict[str, Get] = {
        "%tid.x": lambda thread: thread.index,
        "%ctaid.x": lambda thread: thread.cta.index,
        "%nctaid.x": lambda thread: thread.grid.num_ctas,
        "%laneid": lambda thread: thread.lane,
        "%cluster_ctarank": lambda thread: thread.cta.index % thread.grid.cluster,
        "%globaltimer": lambda thread: thread.grid.now_ns,
        "__dynamic_shmem__0": lambda thread: 0,
    }
    if text in special:
        return special[text]
    if text.startswith("{"):
        low, high = (_raw(part.strip()) for part in text.strip("{}").split(","))
        return lambda thread: (low(thread) & 0xFFFF) | (high(thread) & 0xFFFF) << 16
    if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})", text):
        constant = int(match[1], 16)
        return lambda thread: constant
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        number = int(text.rstrip("U"), 0)
        return lambda thread: number
    return lambda thread: thread.registers[text]


def _address(text: str) -> Get:
    match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
    assert match is not None, text
    base, offset = _raw(match[1]), int(match[2] or 0)
    return lambda thread: base(thread) + offset


def _operands(text: str) -> list[str]:
    """Splits at commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text) if part.strip()]
