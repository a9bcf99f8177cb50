# SPDX-License-Identifier: Apache-2.0
"""The threads that run one program: what they hold, where they are, and what they wait for.

A program's steps take a mask of active threads, all at the same instruction, and return the threads that go on to the
next one; None where each has been told where to go on (`pc`) or what it waits for (`status`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.memory import Memory
from tests.emulator.names import SHARED_BASE
from tests.emulator.values import UNSIGNED, Array

if TYPE_CHECKING:
    from tests.emulator.program import Launch, Program

WARP = 32
MAX_BARRIERS = 16
WINDOW = 24  # bits of an address within a CTA's shared memory; above it the CTA's rank in the cluster, plus one
READY, AT_WARP, AT_BARRIER, AT_CLUSTER, AT_MBARRIER, AT_DEPENDENCY, LATER, DONE = range(8)
WAITS = (
    "",
    "for its warp",
    "at bar.sync",
    "for its cluster",
    "at an mbarrier",
    "for the kernel before",
    "to begin",
    "",
)


class Threads:
    """All threads of the launches of one program.

    Attributes:
        registers: see `names`.
        pc, status: of each thread.
        cta, launch: which each thread belongs to. Clusters are neighbouring CTAs.
        shared: (CTAs, bytes); every byte 0xff at first, which is NaN in every format.
        following: where the running step's threads go on.
    """

    def __init__(self, program: Program, launches: list[Launch], memory: Memory, random: np.random.Generator) -> None:
        self.program, self.launches, self.memory, self.random = program, launches, memory, random
        first = launches[0]
        self.per_cta, self.cluster = first.threads, first.cluster
        assert self.per_cta % WARP == 0, "warps are whole"
        assert len({(one.threads, one.cluster, one.shared_bytes) for one in launches}) == 1
        grids = [one.grid for one in launches]
        counts = np.array([x * y * z for x, y, z in grids])
        self.num_ctas = int(counts.sum())
        count = self.num_ctas * self.per_cta
        self.launch_of_cta = np.repeat(np.arange(len(launches)), counts)
        self.cta = np.repeat(np.arange(self.num_ctas), self.per_cta)
        self.launch = self.launch_of_cta[self.cta]
        self.lane = np.arange(count) % WARP
        self.pc = np.zeros(count, np.int64)
        self.status = np.full(count, LATER, np.int8)
        self.following, self.together = 0, False
        stride = first.shared_bytes + -first.shared_bytes % 16
        self.shared = np.full((self.num_ctas, stride), 0xFF, np.uint8)
        self.shared_bytes = first.shared_bytes
        self.begun = np.zeros(self.num_ctas, bool)
        self.live = np.full(self.num_ctas, self.per_cta)
        self.triggered = np.zeros(self.num_ctas, bool)
        self.before_ended = np.zeros(len(launches), bool)
        self.parameters = np.stack([one.packed_parameters() for one in launches])
        self.num_arrived = np.zeros(self.num_ctas * MAX_BARRIERS, np.int64)
        self.waits_at = np.zeros(count, np.int64)  # number of the barrier, the mbarrier or the phase of the cluster
        self.cluster_arrivals = np.zeros(self.num_ctas // self.cluster, np.int64)
        self.cluster_arrived_in = np.zeros(count, np.int64)
        # mbarriers, by 8 bytes of shared memory
        cells = self.num_ctas * (stride // 8)
        self.expected, self.pending, self.pending_bytes, self.phase = np.zeros((4, cells), np.int64)
        self.stores: list[tuple[Array, Array, Array, bool]] = []  # asynchronous, under way: see `barriers`
        self.copies: list[tuple[Array, ...]] = []  # cp.async under way: see `accesses`
        self.committed = np.zeros(count, np.int64)
        self.registers = self._registers(grids, count)

    def _registers(self, grids: list[tuple[int, int, int]], count: int) -> list[Array]:
        dtypes = self.program.names.dtypes
        blocks = {
            dtype: iter(np.full((dtypes.count(dtype), count * np.dtype(dtype).itemsize), 0xA5, np.uint8).view(dtype))
            for dtype in set(dtypes)
        }
        registers = [next(blocks[dtype]) for dtype in dtypes]
        within = np.arange(self.num_ctas) - np.searchsorted(self.launch_of_cta, self.launch_of_cta)
        x, y, _ = np.array(grids).T[:, self.launch_of_cta]
        special = {
            "%tid.x": np.arange(count) % self.per_cta,
            "%ctaid.x": (within % x)[self.cta],
            "%ctaid.y": (within // x % y)[self.cta],
            "%ctaid.z": (within // x // y)[self.cta],
            "%nctaid.x": x[self.cta],
            "%laneid": self.lane,
            "%lanemask_lt": (1 << self.lane) - 1,
            "%cluster_ctarank": self.cta % self.cluster,
        }
        for name, values in special.items():
            registers[self.program.names.places[name]][:] = values
        return registers

    def set_clock(self, now_ns: int) -> None:
        """What %globaltimer shows."""
        self.registers[self.program.names.places["%globaltimer"]][:] = now_ns

    def begin(self, ctas: Array) -> None:
        """CTAs begin."""
        self.begun[ctas] = True
        self.status[np.isin(self.cta, ctas)] = READY

    def turn(self, chosen: Array, steps: int) -> int:
        """Runs the chosen threads, those at the smallest address first so that they meet again; steps taken.

        Whoever jumps back again and again lets the others go on: he may be waiting for them.
        """
        left, patience = steps, int(self.random.integers(1, 8))
        num_back = np.zeros(len(chosen), np.int64)
        while left > 0:
            chosen = chosen & (self.status == READY)
            first = chosen & (num_back < patience)
            places = self.pc[first]
            if not places.size:
                if not chosen.any():
                    break
                num_back[:] = 0
                continue
            at = int(places.min() if self.random.random() < 0.95 else self.random.choice(places))
            active = first & (self.pc == at)
            self.together = np.count_nonzero(active) == np.count_nonzero(chosen)
            left = self._run_from(at, active, left)
            num_back += active & (self.pc <= at)
        return steps - left

    def _run_from(self, at: int, active: Array, steps: int) -> int:
        """Until threads part, wait, or come to where others may be; steps left."""
        program = self.program
        while True:
            self.following = at + 1
            try:
                go_on = program.steps[at](self, active)
            except AssertionError as error:
                ctas = np.unique(self.cta[active]).tolist()
                raise AssertionError(f"{error} (`{program.body[at]}`, CTAs {ctas[:8]})") from error
            steps -= 1
            if go_on is None:
                return steps
            active, at = go_on, self.following
            if steps <= 0 or (program.joins[at] and not self.together):
                self.pc[active] = at
                return steps

    def release(self, kind: int, over: Callable[[Array], Array]) -> None:
        """Lets threads go on that wait for something of a kind, where `over` says so of their numbers."""
        waiting = np.flatnonzero(self.status == kind)
        self.status[waiting[over(waiting)]] = READY

    def end(self, active: Array) -> None:
        """Threads end."""
        self.status[active] = DONE
        self.live -= np.bincount(self.cta[active], minlength=self.num_ctas)

    def launch_done(self, which: int) -> bool:
        """Whether all threads of a launch have ended."""
        return not self.live[self.launch_of_cta == which].any()

    def lets_dependents_begin(self, which: int) -> bool:
        """Whether each CTA of a launch has triggered or ended."""
        mine = self.launch_of_cta == which
        return bool((self.triggered[mine] | (self.live[mine] == 0)).all())

    def shared_places(self, addr: Array, threads: Array, size: int, count: int = 1) -> Array:
        """For each thread the places of `count` elements of `size` bytes in `shared`, an array of such elements."""
        offset = (addr & np.uint64((1 << WINDOW) - 1)).astype(np.int64) - SHARED_BASE
        wrong = (offset % (size * count) != 0) | (offset < 0) | (offset + size * count > self.shared_bytes)
        if wrong.any():
            raise AssertionError(
                f"shared access to {size * count} bytes at byte {offset[wrong][0]} of {self.shared_bytes}"
            )
        start = self._owner(addr, threads) * self.shared.shape[1] + offset
        return start[:, None] // size + np.arange(count)

    def _owner(self, addr: Array, threads: Array) -> Array:
        """The CTA whose shared memory an address lies in."""
        own = self.cta[threads]
        rank = (addr >> np.uint64(WINDOW)).astype(np.int64)
        if not rank.any():
            return own
        assert (rank <= self.cluster).all(), "no such CTA in the cluster"
        cta = np.where(rank > 0, own - own % self.cluster + rank - 1, own)
        assert self.begun[cta].all(), "shared memory of a CTA that has not begun"
        assert self.live[cta].all(), "shared memory of a CTA that has exited"
        return cta

    def shared_as(self, size: int) -> Array:
        """All shared memory as a flat array of elements of `size` bytes."""
        return self.shared.reshape(-1).view(UNSIGNED[size])

    def describe(self) -> list[str]:
        """Who waits for what."""
        seen: dict[tuple[int, str], Any] = {}
        for thread in np.flatnonzero(self.status != DONE):
            at = self.program.body[min(self.pc[thread], len(self.program.body) - 1)]
            seen.setdefault((int(self.cta[thread]), f"waits {WAITS[self.status[thread]]}: `{at}`"), thread)
        return [f"CTA {cta} thread {thread % self.per_cta} {what}" for (cta, what), thread in seen.items()]
