# SPDX-License-Identifier: Apache-2.0
"""Whole graphs of a stress run in the emulator: turns, late ranks and real gathers, three ranks beside each other."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
from nvcomm.collectives.late_copy import LateCopyKernel, stash_bytes
from nvcomm.collectives.mailbox_kernel import MailboxKernel
from nvcomm.mailbox import STATE_OUTBOX, MailboxLayout
from stress import ledger
from stress.decode import Origin, decode
from stress.graph_steps import CollectiveStep, LateStep, TurnStep, steps_of
from stress.host_oracle import HostOracle
from stress.kernels.kernel import RankHandle
from stress.kernels.late import Late
from stress.kernels.turn import Turn
from stress.plan import GraphSpec
from tests.emulator.program import Launch
from tests.emulator.ranks import Ranks, program
from tests.unit.stress_kernels import RANKS, RESERVED, launch

LAYOUT = MailboxLayout(RANKS, 1024)
SIZES = ((4, 60, 32), (128, 8, 16))
STRIDE = 4 * 128 * RANKS
LAUNCHES = 2
REPLAYS = LAUNCHES * len(SIZES)
LEDGER_BYTES = 4 * ledger.LEDGER_WORDS
TIMEOUT_NS = 2_000_000  # of simulated time; what is right waits for a tenth of it
GENERATION = 2**32 - 4  # the count of collectives wraps in mid-run


class World:
    """Mailboxes, and a ledger, inputs and outputs of each rank."""

    def __init__(self, seed: int, pdl: str, kernel: type[MailboxKernel] = AllGatherKernel) -> None:
        self.ranks = Ranks(LAYOUT, seed, GENERATION, TIMEOUT_NS, late=True)
        self.config = AllGatherConfig(LAYOUT, threads=32, pdl=pdl)
        self.kernel = kernel
        reserved = 0 if kernel is LateCopyKernel else RESERVED  # it has no escapes
        self.oracle = HostOracle(seed, RANKS, reserved)
        memory, seed_key = self.ranks.memory, self.oracle.seed_key
        room = [[memory.allocate(bytes(3 * STRIDE)) for _ in range(2)] for _ in range(RANKS)]
        self.handles = [
            RankHandle(
                x, STRIDE, out, STRIDE, memory.allocate(bytes(4 * ledger.LEDGER_WORDS)), seed_key, reserved, rank
            )
            for rank, (x, out) in enumerate(room)
        ]
        self.elsewhere = memory.allocate(bytes(STRIDE))
        for state in self.ranks.states if kernel is LateCopyKernel else ():
            memory.write(state + 4 * STATE_OUTBOX, 8, memory.allocate(bytes(stash_bytes(LAYOUT))))

    def graph(self, spec: GraphSpec, rank: int) -> list[Launch]:
        """What `GpuRank` launches for it."""
        handle = self.handles[rank]
        launches = []
        for site, step in enumerate(steps_of(spec, rank), 1):
            match step:
                case TurnStep():
                    work = Turn(step.check, step.fill, step.cell_in, step.cell_out, step.step)
                    launches.append(launch("turn", work, handle))
                case LateStep():
                    launches.append(launch("late", Late(step.cell), handle, 1))
                case CollectiveStep():
                    x, out = handle.x + step.gather * STRIDE, handle.out + step.gather * STRIDE
                    launches.append(self.gather(rank, x, out, step.words, site))
        return launches

    def gather(self, rank: int, x: int, out: int, words: int, site: int = 1) -> Launch:
        parameters = [x, out, 4 * words, *self.ranks.box(rank), rank, site, 0, 0]
        return Launch(program(self.kernel, self.config), parameters, (1, 1, 1), self.config.threads)

    def readings(self) -> list[ledger.LedgerReading]:
        read = [self.ranks.memory.bytes_at(handle.ledger, LEDGER_BYTES) for handle in self.handles]
        return [ledger.read(np.frombuffer(one, np.uint32).tolist()) for one in read]


def specs(*, spaced: bool) -> list[GraphSpec]:
    """One graph of each launch, with another rank late."""
    return [GraphSpec(number, SIZES, number + 1, spaced, big=False) for number in range(LAUNCHES)]


@pytest.mark.parametrize(("spaced", "pdl"), [(True, "off"), (False, "safe")])
def test_right_gathers_are_compared_and_right(seed, spaced, pdl):
    world = World(seed, pdl)
    world.ranks.run([[one for spec in specs(spaced=spaced) for one in world.graph(spec, r)] for r in range(RANKS)])
    for reading in world.readings():
        assert reading == ledger.LedgerReading(REPLAYS, 3 * REPLAYS, 0, None)
    world.ranks.assert_clean(3 * REPLAYS, GENERATION)


def test_an_output_that_the_last_gather_of_the_last_rank_leaves_as_it_was_is_seen(seed):
    """The negative control: that gather writes elsewhere, so what the replay before left is taken for its output."""
    world = World(seed, "off")
    chains = [[one for spec in specs(spaced=False) for one in world.graph(spec, rank)] for rank in range(RANKS)]
    last, words = RANKS - 1, SIZES[-1][-1]
    x = world.handles[last].x + 2 * STRIDE
    chains[last][-2] = world.gather(last, x, world.elsewhere, words)
    world.ranks.run(chains)
    *others, reading = world.readings()
    assert others == [ledger.LedgerReading(REPLAYS, 3 * REPLAYS, 0, None)] * last
    assert (reading.replay, reading.gathers) == (REPLAYS, 3 * REPLAYS)
    assert 0.5 * RANKS * words < reading.bad_words <= RANKS * words  # reserved words may agree
    assert (reading.first.replay, reading.first.gather) == (REPLAYS - 1, 2)


def test_the_known_bad_protocol_shows_a_word_of_an_earlier_gather(seed):
    """The control as a whole: the same turns see what it hands out, and the host says where that came from."""
    world = World(seed, "off", LateCopyKernel)
    world.ranks.run([world.graph(specs(spaced=True)[0], rank) for rank in range(RANKS)])
    kinds = []
    for rank, reading in enumerate(world.readings()):
        if first := reading.first:
            place = Origin(first.src_rank, first.gather, first.replay, first.index)
            kinds.append(decode(world.oracle, rank, place, first.seen, row_words).kind)
    assert "stale" in kinds


def row_words(gather: int, replay: int) -> int:
    return SIZES[replay % len(SIZES)][gather]
