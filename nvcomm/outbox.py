# SPDX-License-Identifier: Apache-2.0
"""The outbox of the `delayed` transport (tests, stress): what a rank has published and an agent has yet to deliver.

Hardware promises little: a store arrives at each destination some time, and in any order with others. Mostly it is
quick, and races that need a rare moment stay hidden. With this transport a publish goes into a ring of entries in the
rank's own memory, and another kernel (`nvcomm.collectives.delivery`) stores each entry, word by word and in any order,
after a seeded pseudo-random delay; so a copy can land long after the collective that sent it has ended.

    counters   HEAD entries claimed, ENDED launches whose end was marked, DELIVERED launches an agent served
    next       for each of the agent's threads, the entry that it serves next, less its own index
    entries    RING x {address, 4 words, turn, count of words}; turn is 2 * lap while free, 2 * lap + 1 while full

Entries are counted modulo 2^32, so laps start again at 0 behind lap 2^32 / RING - 1: about 600,000 replays of stress.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int64, Uint32, Uint64, range_constexpr

from nvcomm.ptx import memory as ptx

AGENT_THREADS = 1024
RING = 64 * AGENT_THREADS
TURNS = 2 * (2**32 // RING)
HEAD, ENDED, DELIVERED = 0, 4, 8
NEXT = 128
ENTRIES = NEXT + AGENT_THREADS * 4
ENTRY_BYTES = 32
ENTRY_WORDS, ENTRY_TURN, ENTRY_COUNT = 8, 24, 28
OUTBOX_BYTES = ENTRIES + RING * ENTRY_BYTES


@cute.jit
def post(outbox: Int64, addr: Int64, words: tuple[Uint32, ...]) -> None:
    """Puts 1 or 4 words for `addr` into the outbox; waits while the ring is full."""
    claimed = ptx.atom_add_relaxed_gpu(outbox + HEAD, Uint32(1))
    entry = outbox + ENTRIES + Int64(claimed % Uint32(RING)) * ENTRY_BYTES
    turn = (claimed // Uint32(RING)) * Uint32(2)
    while ptx.ld_acquire_gpu(entry + ENTRY_TURN) != turn:
        pass
    ptx.st_relaxed_gpu_u64(entry, Uint64(addr))
    for i in range_constexpr(len(words)):
        ptx.st_relaxed_gpu(entry + ENTRY_WORDS + i * 4, words[i])
    ptx.st_relaxed_gpu(entry + ENTRY_COUNT, Uint32(len(words)))
    ptx.st_release_gpu(entry + ENTRY_TURN, turn + Uint32(1))


@cute.jit
def deliver(entry: Int64, turn: Uint32, noise: Uint32) -> None:
    """Stores a full entry's words, each in its own time, and frees the entry for the next lap.

    Args:
        entry: its address.
        turn: its turn while full.
        noise: 32 pseudo-random bits: one entry in 64 waits up to 16 us, the others up to 2 us, and the words go in an
            order that the lowest bits choose.
    """
    addr = Int64(ptx.ld_relaxed_gpu_u64(entry))
    count = ptx.ld_relaxed_gpu(entry + ENTRY_COUNT)
    delay_ns = Int64(noise >> Uint32(21))
    if (noise >> Uint32(3)) % Uint32(64) == 0:
        delay_ns = delay_ns * 8
    start = cute.arch.globaltimer()
    while cute.arch.globaltimer() - start < delay_ns:
        pass
    for i in range_constexpr(4):
        which = (noise ^ Uint32(i)) & Uint32(3)
        if Boolean(count == 4) | Boolean(which == 0):
            word = ptx.ld_relaxed_gpu(entry + ENTRY_WORDS + Int64(which) * 4)
            ptx.st_relaxed_sys(addr + Int64(which) * 4, word)
    ptx.st_release_gpu(entry + ENTRY_TURN, (turn + Uint32(1)) % Uint32(TURNS))
