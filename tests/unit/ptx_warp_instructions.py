# SPDX-License-Identifier: Apache-2.0
"""What memory, warp and control instructions do to the threads of a cluster: see `ptx_warps`."""

from __future__ import annotations

import re

import numpy as np

from tests.unit.ptx_warp_arithmetic import ARITHMETIC, U64, bf16_to_f32, f16_to_f32, f32, from_f32, halves, vector
from tests.unit.ptx_warps import WARP, Cluster, Statement

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def execute(c: Cluster, s: Statement, active: np.ndarray, pc: int) -> None:
    """Runs one instruction for the active threads."""
    parts = s.opcode.split(".")
    handler = HANDLERS.get(parts[0])
    assert handler is not None, f"unknown instruction {s.opcode}"
    handler(c, s, parts, active, pc)


# --- memory -----------------------------------------------------------------------------------------------------------
def load(c, s, parts, active, pc):
    names, size = vector(s.operands[0]), BYTES[re.sub(r"\D", "", parts[-1])]
    if parts[1] == "param":
        table = np.array([bits & 0xFFFFFFFFFFFFFFFF for bits in c.parameters.values()], U64)
        return c.store(names[0], table[np.where(active, c.address(s.operands[1]), 0).astype(int) // 8], active)
    total = size * len(names)
    if parts[1] == "global":
        raw = c.memory.data[c.memory.places(c.address(s.operands[1])[active], total)]
    else:
        cta, places = c.shared_places(c.address(s.operands[1]), active, total)
        raw = c.shared[cta[:, None], places]
    words = np.ascontiguousarray(raw).view(f"u{size}")
    for i, name in enumerate(names):
        bits = np.zeros(len(c.cta), U64)
        bits[active] = words[:, i]
        c.store(name, bits, active)
    return None


def as_bytes(c, names, size, active):
    words = np.stack([c.value(name)[active] for name in names], axis=1)
    return np.ascontiguousarray(words.astype(f"u{size}")).view(np.uint8)


def store(c, s, parts, active, pc):
    names, size = vector(s.operands[1]), BYTES[re.sub(r"\D", "", parts[-1])]
    raw = as_bytes(c, names, size, active)
    if parts[1] == "global":
        c.memory.data[c.memory.places(c.address(s.operands[0])[active], raw.shape[1])] = raw
        return
    cta, places = c.shared_places(c.address(s.operands[0]), active, raw.shape[1])
    c.shared[cta[:, None], places] = raw
    if parts[1] == "async":
        assert (c.address(s.operands[0])[active] >> U64(24) == c.address(s.operands[2])[active] >> U64(24)).all()
        for addr, own in zip(c.address(s.operands[2])[active].tolist(), c.cta[active].tolist(), strict=True):
            c.mbarrier(addr, own)[1] -= raw.shape[1]
        c.changes += 1


def copy(c, s, parts, active, pc):
    if parts[2] == "wait_group":
        left = []
        for threads, target, raw in c.copies:
            now = active[threads]
            cta, places = c.cta[threads[now]], target[now]
            c.shared[cta[:, None], places] = raw[now]
            left.append((threads[~now], target[~now], raw[~now]))
        c.copies = [one for one in left if len(one[0])]
        return
    if parts[2] == "commit_group":
        return
    size, count = int(s.operands[2]), c.value(s.operands[3])[active]
    assert np.isin(count, (0, size)).all()
    cta, target = c.shared_places(c.address(s.operands[0]), active, size)
    raw = np.zeros((len(cta), size), np.uint8)
    read = count == size
    raw[read] = c.memory.data[c.memory.places(c.address(s.operands[1])[active][read], size)]
    c.copies.append((np.flatnonzero(active), target, raw))


# --- warps ------------------------------------------------------------------------------------------------------------
def warps(active):
    whole = active.reshape(-1, WARP)
    assert (whole.all(axis=1) == whole.any(axis=1)).all(), "a warp instruction without all its lanes"
    return whole.any(axis=1)


def shuffle(c, s, parts, active, pc):
    on = warps(active)
    value, lane = c.value(s.operands[1]).reshape(-1, WARP), np.arange(WARP)
    other = c.value(s.operands[2]).reshape(-1, WARP).astype(np.int64)
    source = lane ^ other if parts[2] == "bfly" else other & 31
    c.store(s.operands[0], np.take_along_axis(value, source, axis=1).reshape(-1), np.repeat(on, WARP))


def vote(c, s, parts, active, pc):
    on = warps(active)
    bits = (c.value(s.operands[1]).reshape(-1, WARP).astype(U64) << np.arange(WARP, dtype=U64)).sum(axis=1, dtype=U64)
    c.store(s.operands[0], np.repeat(bits, WARP), np.repeat(on, WARP))


def load_matrices(c, s, parts, active, pc):
    on = warps(active)
    cta, places = c.shared_places(c.address(s.operands[1]), active, 16)
    rows = np.ascontiguousarray(c.shared[cta[:, None], places]).view(np.uint16).reshape(-1, 4, 8, 8).astype(U64)
    if "trans" in parts:
        rows = rows.transpose(0, 1, 3, 2)
    words = rows[..., 0::2] | (rows[..., 1::2] << U64(16))
    for i, name in enumerate(vector(s.operands[0])):
        bits = np.zeros((len(on), WARP), U64)
        bits[on] = words[:, i].reshape(-1, WARP)
        c.store(name, bits.reshape(-1), active)


def matrix_multiply(c, s, parts, active, pc):
    warps(active)
    unpack = bf16_to_f32 if "bf16" in parts else f16_to_f32
    names = [vector(one) for one in s.operands]

    def values(name):
        return np.stack([unpack(half) for half in halves(c.value(name))], axis=-1).reshape(-1, 8, 4, 2)

    a = [values(name).reshape(-1, 8, 8) for name in names[1]]
    b = [values(name).reshape(-1, 8, 8) for name in names[2]]
    left = np.concatenate([np.concatenate([a[0], a[2]], 2), np.concatenate([a[1], a[3]], 2)], 1).astype(np.float64)
    right = np.concatenate(b, axis=2).transpose(0, 2, 1).astype(np.float64)
    product = left @ right
    for i, (target, source) in enumerate(zip(names[0], names[3], strict=True)):
        part = product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].reshape(-1)
        c.store(target, from_f32(f32(c.value(source)).astype(np.float64) + part), active)


# --- control ----------------------------------------------------------------------------------------------------------
def branch(c, s, parts, active, pc):
    places = c.program.labels[s.operands[0]]
    # A label in braces may occur twice: the nearest one before.
    c.pc[active] = places[0] if len(places) == 1 else max(one for one in places if one <= pc)


def barrier(c, s, parts, active, pc):
    if s.opcode.startswith("bar.warp"):
        return
    if s.opcode.startswith("barrier.cluster.arrive"):
        c.arrived[active] += 1
    elif s.opcode == "barrier.cluster.wait":
        c.in_cluster_wait |= active
    else:
        c.barrier[active] = c.value(s.operands[0])[active].astype(int)
        for cta in range(c.num_ctas):
            here = c.cta == cta
            for number in np.unique(c.barrier[here & (c.barrier >= 0)]):
                waiting = here & (c.barrier == number)
                wanted = int(s.operands[1]) if len(s.operands) > 1 else int((here & ~c.done).sum())
                if waiting.sum() == wanted and (waiting & active).any():
                    c.barrier[waiting] = -1
    if c.in_cluster_wait.any() and c.arrived.min() >= c.arrived[c.in_cluster_wait].max():
        c.in_cluster_wait[:] = False


def mbarrier(c, s, parts, active, pc):
    if parts[1] == "try_wait":
        addr = c.address(s.operands[1])
        ready = np.zeros(len(c.cta), bool)
        for i in np.flatnonzero(active):
            ready[i] = c.mbarrier(int(addr[i]), int(c.cta[i])) == [0, 0]
        c.store(s.operands[0], ready, active)
        c.polling |= active & ~ready
        return
    addr = c.address(s.operands[0 if parts[1] == "init" else 1])
    for i in np.flatnonzero(active):
        key = (int(c.cta[i]), int(addr[i]) & 0xFFFFFF)
        if parts[1] == "init":
            c.mbarriers[key] = [int(c.value(s.operands[1])[i]), 0]
        else:
            c.mbarriers[key][0] -= 1
            c.mbarriers[key][1] += int(c.value(s.operands[2])[i])
        c.changes += 1


def map_address(c, s, parts, active, pc):
    addr, rank = c.value(s.operands[1]), c.value(s.operands[2]) & U64(0xFFFFFFFF)
    assert (rank[active] < c.num_ctas).all(), "mapa to a CTA that the cluster does not have"
    c.store(s.operands[0], (addr & U64(0xFFFFFF)) | ((rank + U64(1)) << U64(24)), active)


def end(c, s, parts, active, pc):
    c.done |= active


def nothing(c, s, parts, active, pc):
    pass


HANDLERS = {
    **ARITHMETIC,
    "ld": load, "st": store, "cp": copy, "ldmatrix": load_matrices, "mma": matrix_multiply,
    "shfl": shuffle, "vote": vote, "bra": branch, "bar": barrier, "barrier": barrier, "mbarrier": mbarrier,
    "mapa": map_address, "ret": end, "fence": nothing, "griddepcontrol": nothing,
}  # fmt: skip
