# SPDX-License-Identifier: Apache-2.0
"""Instructions that a whole warp executes together: shuffles, votes, reductions, matrices.

All 32 lanes take part. A lane that comes first waits; lanes of a warp that wait at different instructions are an error.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emulator.accesses import Step
from tests.emulator.names import Names, vector
from tests.emulator.ptx import Instruction
from tests.emulator.threads import AT_WARP, READY, WARP, Threads
from tests.emulator.values import Array, bf16_to_f32, f16_to_f32, from_f32

Together = Callable[[Threads, Array], None]  # given the lanes of complete warps


def _meeting(at: int, together: Together) -> Step:
    """A step that runs `together` for the warps that are complete."""

    def step(t: Threads, active: Array) -> Array | None:
        whole = active.reshape(-1, WARP)
        complete = whole.all(axis=1)
        if not (complete == whole.any(axis=1)).all():
            t.status[active], t.pc[active] = AT_WARP, at
            waiting = (t.status == AT_WARP).reshape(-1, WARP)
            complete = (waiting & (t.pc == at).reshape(-1, WARP)).all(axis=1)
            apart = waiting.all(axis=1) & ~complete
            assert not apart.any(), "lanes of a warp meet in different instructions"
            active = np.repeat(complete, WARP)
            t.status[active] = READY
            if not complete.any():
                return None
        together(t, active)
        return active

    return step


def compile_shuffle(names: Names, one: Instruction, at: int) -> Step:
    """shfl.sync with all lanes; a lane that would reach past the first keeps its own value."""
    mode = one.opcode.split(".")[2]
    target, _, flag = one.operands[0].partition("|")
    write, write_flag = names.write(target), names.write(flag or "_")
    value, which = names.source(one.operands[1], "b32"), names.source(one.operands[2], "s32")
    _all_lanes(one)
    source_lane = {
        "idx": lambda lane, n: n & (WARP - 1),
        "bfly": lambda lane, n: lane ^ n,
        "up": lambda lane, n: lane - n,
        "down": lambda lane, n: lane + n,
    }[mode]

    def together(t: Threads, active: Array) -> None:
        lane = np.broadcast_to(source_lane(t.lane, which(t.registers)), active.shape)
        inside = (lane >= 0) & (lane < WARP)
        lane = np.where(inside, lane, t.lane)
        given = np.broadcast_to(value(t.registers), active.shape)
        write(t.registers, given[np.arange(len(active)) - t.lane + lane], active)
        write_flag(t.registers, inside, active)

    return _meeting(at, together)


def compile_vote(names: Names, one: Instruction, at: int) -> Step:
    """vote.sync.any, .all, .ballot with all lanes."""
    mode, write = one.opcode.split(".")[2], names.write(one.operands[0])
    value = names.source(one.operands[1], "pred")
    _all_lanes(one)

    def together(t: Threads, active: Array) -> None:
        votes = np.broadcast_to(value(t.registers), active.shape).reshape(-1, WARP)
        if mode == "ballot":
            result = (votes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
        else:
            result = {"any": votes.any, "all": votes.all}[mode](axis=1)
        write(t.registers, np.repeat(result, WARP), active)

    return _meeting(at, together)


def compile_reduction(names: Names, one: Instruction, at: int) -> Step:
    """redux.sync.add, .max, .min of u32 with all lanes."""
    _, _, operation, kind = one.opcode.split(".")
    write, value = names.write(one.operands[0]), names.source(one.operands[1], kind)
    _all_lanes(one)
    reduce = {"add": np.add, "max": np.maximum, "min": np.minimum}[operation].reduce

    def together(t: Threads, active: Array) -> None:
        lanes = np.broadcast_to(value(t.registers), active.shape).reshape(-1, WARP)
        write(t.registers, np.repeat(reduce(lanes, axis=1, dtype=lanes.dtype), WARP), active)

    return _meeting(at, together)


def compile_warp_barrier(names: Names, one: Instruction, at: int) -> Step:
    """bar.warp.sync."""
    _all_lanes(one)
    return _meeting(at, lambda t, active: None)


def compile_load_matrices(names: Names, one: Instruction, at: int) -> Step:
    """ldmatrix.x4: lane i gives the address of row i % 8 of matrix i // 8."""
    assert ".m8n8.x4." in one.opcode, one
    address, targets = names.address(one.operands[1]), [names.write(name) for name in vector(one.operands[0])]
    transposed = ".trans" in one.opcode

    def together(t: Threads, active: Array) -> None:
        threads = np.flatnonzero(active)
        rows = t.shared_as(2)[_rows(t, address(t.registers)[threads], threads)].reshape(-1, 4, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        words = rows[..., 0::2].astype(np.uint32) | rows[..., 1::2].astype(np.uint32) << np.uint32(16)
        for i, write in enumerate(targets):
            bits = np.zeros((len(active) // WARP, WARP), np.uint32)
            bits[active.reshape(-1, WARP)[:, 0]] = words[:, i].reshape(-1, WARP)
            write(t.registers, bits.reshape(-1), active)

    return _meeting(at, together)


def _rows(t: Threads, addr: Array, threads: Array) -> Array:
    assert not (addr % np.uint64(16)).any(), "a row of a matrix that is not aligned to 16 bytes"
    return t.shared_places(addr, threads, 2, 8)


def compile_matrix_multiply(names: Names, one: Instruction, at: int) -> Step:
    """mma.m16n8k16 of BF16 or F16 with FP32 sums."""
    assert ".m16n8k16.row.col.f32." in one.opcode, one
    unpack = bf16_to_f32 if ".bf16." in one.opcode else f16_to_f32
    a_sources, b_sources = ([names.source(name, "b32") for name in vector(text)] for text in one.operands[1:3])
    sums = [names.source(name, "f32") for name in vector(one.operands[3])]
    targets = [names.write(name) for name in vector(one.operands[0])]

    def eight_by_eight(t: Threads, source: Callable[[list[Array]], Array], active: Array) -> Array:
        """Two values of each lane: four lanes make a row of eight."""
        return unpack(source(t.registers)[active].view(np.uint16)).reshape(-1, 8, 8).astype(np.float64)

    def together(t: Threads, active: Array) -> None:
        a = [eight_by_eight(t, source, active) for source in a_sources]
        b = [eight_by_eight(t, source, active) for source in b_sources]
        left = np.concatenate([np.concatenate([a[0], a[2]], 2), np.concatenate([a[1], a[3]], 2)], 1)
        product = left @ np.concatenate(b, axis=2).transpose(0, 2, 1)
        for i, (write, source) in enumerate(zip(targets, sums, strict=True)):
            part = product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].reshape(-1)
            bits = np.zeros(len(active), np.uint32)
            bits[active] = from_f32(
                np.broadcast_to(source(t.registers), active.shape)[active].astype(np.float64) + part
            )
            write(t.registers, bits, active)

    return _meeting(at, together)


def _all_lanes(one: Instruction) -> None:
    assert one.operands[-1] in ("-1", "0xffffffff"), f"`{one}`: the emulator knows instructions of all lanes only"
