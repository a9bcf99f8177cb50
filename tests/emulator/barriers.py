# SPDX-License-Identifier: Apache-2.0
"""How threads wait for each other: barriers of a CTA and of a cluster, mbarriers and st.async, dependent launches."""

from __future__ import annotations

import numpy as np

from tests.emulator.accesses import Step, values_of
from tests.emulator.names import Names
from tests.emulator.ptx import Instruction
from tests.emulator.threads import (
    AT_BARRIER,
    AT_CLUSTER,
    AT_DEPENDENCY,
    AT_MBARRIER,
    MAX_BARRIERS,
    WINDOW,
    Threads,
)
from tests.emulator.values import Array, size_of


def compile_barrier(names: Names, one: Instruction, at: int) -> Step:
    """bar.sync and bar.arrive; without a number all threads of the CTA are awaited."""
    number = names.source(one.operands[0], "u32")
    wanted = int(one.operands[1]) if len(one.operands) > 1 else None
    waits = one.opcode.startswith("bar.sync")

    def step(t: Threads, active: Array) -> Array | None:
        key = (t.cta * MAX_BARRIERS + number(t.registers))[active]
        come = np.bincount(key, minlength=len(t.num_arrived))
        t.num_arrived += come
        if waits:
            t.waits_at[active], t.status[active], t.pc[active] = key, AT_BARRIER, at + 1
        full = t.per_cta if wanted is None else wanted
        assert (t.num_arrived[key] <= full).all(), f"more threads at a barrier than the {full} it counts"
        complete = (t.num_arrived == full) & (come > 0)
        if complete.any():
            t.release(AT_BARRIER, lambda waiting: complete[t.waits_at[waiting]])
            t.num_arrived[complete] = 0
        return None if waits else active

    return step


def compile_cluster_barrier(names: Names, one: Instruction, at: int) -> Step:
    """barrier.cluster.arrive and .wait."""

    def arrive(t: Threads, active: Array) -> Array:
        cluster = t.cta // t.cluster
        size = t.per_cta * t.cluster
        t.cluster_arrived_in[active] = (t.cluster_arrivals // size)[cluster[active]]
        t.cluster_arrivals += np.bincount(cluster[active], minlength=len(t.cluster_arrivals))
        phase = (t.cluster_arrivals // size)[cluster]
        t.release(AT_CLUSTER, lambda waiting: t.waits_at[waiting] < phase[waiting])
        return active

    def wait(t: Threads, active: Array) -> None:
        phase = (t.cluster_arrivals // (t.per_cta * t.cluster))[t.cta // t.cluster]
        t.pc[active] = at + 1
        stay = active & (t.cluster_arrived_in == phase)
        t.waits_at[stay], t.status[stay] = phase[stay], AT_CLUSTER

    return arrive if one.opcode.startswith("barrier.cluster.arrive") else wait


def compile_mbarrier(names: Names, one: Instruction, at: int) -> Step:
    """mbarrier.init, .arrive.expect_tx and .try_wait.parity, which here waits as long as it takes."""
    action = one.opcode.split(".")[1]
    if action == "try_wait":
        return _compile_try_wait(names, one, at)
    address = names.address(one.operands[0 if action == "init" else 1])
    number = values_of(names, one.operands[-1], 4)

    def init(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        which, count = cells(t, address(t.registers)[threads], threads), number(t, threads)[:, 0]
        t.expected[which] = t.pending[which] = count
        t.pending_bytes[which] = t.phase[which] = 0
        return active

    def arrive(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        if threads.size:
            which = cells(t, address(t.registers)[threads], threads)
            assert (t.expected[which] > 0).all(), "arrival at an mbarrier that was not initialised"
            np.add.at(t.pending_bytes, which, number(t, threads)[:, 0].astype(np.int64))
            np.subtract.at(t.pending, which, 1)
            assert (t.pending[which] >= 0).all(), "arrival at an mbarrier that expects none"
            settle(t, which)
        return active

    return init if action == "init" else arrive


def _compile_try_wait(names: Names, one: Instruction, at: int) -> Step:
    write, address = names.write(one.operands[0]), names.address(one.operands[1])
    parity = names.source(one.operands[2], "u32")

    def wait(t: Threads, active: Array) -> Array | None:
        threads = np.flatnonzero(active)
        which = cells(t, address(t.registers)[threads], threads)
        over = (t.phase[which] & 1) != np.broadcast_to(parity(t.registers), active.shape)[threads]
        stay = threads[~over]
        t.status[stay], t.pc[stay], t.waits_at[stay] = AT_MBARRIER, at, which[~over]
        if not over.any():
            return None
        active = active.copy()
        active[stay] = False
        write(t.registers, np.bool_(True), active)
        return active

    return wait


def cells(t: Threads, addr: Array, threads: Array) -> Array:
    """Numbers of the mbarriers at shared addresses."""
    return t.shared_places(addr, threads, 8)[:, 0]


def settle(t: Threads, which: Array) -> None:
    """Ends the phase of mbarriers for which nothing is awaited any more."""
    ended = np.unique(which)
    ended = ended[(t.pending[ended] == 0) & (t.pending_bytes[ended] == 0) & (t.expected[ended] > 0)]
    if ended.size:
        t.pending[ended] = t.expected[ended]
        t.phase[ended] += 1
        t.release(AT_MBARRIER, lambda waiting: np.isin(t.waits_at[waiting], ended))


def compile_store_async(names: Names, one: Instruction, at: int) -> Step:
    """st.async and red.async.add: land some time later, in any order, and tell the mbarrier beside them."""
    adds = one.opcode.startswith("red")
    assert not adds or ".add.u" in one.opcode, one
    size = size_of(one.opcode.split(".")[-1])
    address, counter = names.address(one.operands[0]), names.address(one.operands[2])
    read = values_of(names, one.operands[1], size)

    def step(t: Threads, active: Array) -> Array:
        threads = np.flatnonzero(active)
        if threads.size:
            addr, values, beside = address(t.registers)[threads], read(t, threads), counter(t.registers)[threads]
            assert (addr >> np.uint64(WINDOW) == beside >> np.uint64(WINDOW)).all(), (
                "an asynchronous store and its mbarrier lie in different CTAs"
            )
            assert (addr >= np.uint64(1 << WINDOW)).all(), "an asynchronous store to an address not from mapa"
            places = t.shared_places(addr, threads, size, values.shape[1])
            t.stores.append((places, values, cells(t, beside, threads), adds))
        return active

    return step


def land_stores(t: Threads, share: float) -> None:
    """Lets about `share` of the asynchronous stores arrive, of half of the instructions."""
    left = []
    for one in t.stores:
        if t.random.random() < 0.5:
            left.append(one)
            continue
        places, values, which, adds = one
        now = t.random.random(len(which)) < share
        if adds:
            np.add.at(t.shared_as(values.itemsize), places[now], values[now])
        else:
            t.shared_as(values.itemsize)[places[now]] = values[now]
        owners = which[now] // (t.shared.shape[1] // 8)
        assert t.live[owners].all(), "a store arrives in a CTA that has exited"
        assert (t.expected[which[now]] > 0).all(), "a store arrives at an mbarrier that was not initialised"
        np.subtract.at(t.pending_bytes, which[now], values.shape[1] * values.itemsize)
        settle(t, which[now])
        if not now.all():
            left.append((places[~now], values[~now], which[~now], adds))
    t.stores = left


def compile_map_address(names: Names, one: Instruction, at: int) -> Step:
    """mapa.shared::cluster."""
    write = names.write(one.operands[0])
    addr, rank = names.source(one.operands[1], "u32"), names.source(one.operands[2], "u32")

    def step(t: Threads, active: Array) -> Array:
        which = np.broadcast_to(rank(t.registers), active.shape)
        assert (which[active] < t.cluster).all(), "mapa to a CTA that the cluster does not have"
        own = addr(t.registers) & np.uint32((1 << WINDOW) - 1)
        write(t.registers, own | which + np.uint32(1) << np.uint32(WINDOW), active)
        return active

    return step


def compile_dependency(names: Names, one: Instruction, at: int) -> Step:
    """griddepcontrol: the end of the kernel before, and the permission for the next one to begin."""

    def wait(t: Threads, active: Array) -> Array | None:
        ended = t.before_ended[t.launch]
        stay = active & ~ended
        t.status[stay], t.pc[stay] = AT_DEPENDENCY, at + 1
        go_on = active & ended
        return go_on if go_on.any() else None

    def trigger(t: Threads, active: Array) -> Array:
        t.triggered[t.cta[active]] = True
        return active

    return wait if one.opcode == "griddepcontrol.wait" else trigger
