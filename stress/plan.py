# SPDX-License-Identifier: Apache-2.0
"""What is replayed: a pool of graphs of three back-to-back gathers each, and a random order, both from the seed alone.

Every rank computes the same plan by itself. The order is a function of the launch number, so it needs no state and
tells, long after, which graph a replay belonged to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvcomm.errors import UsageError
from nvcomm.mailbox import CHUNK_WORDS, WORD_BYTES
from stress import oracle
from stress.host_oracle import HostOracle

MIN_BYTES = 16
SMALL_BYTES = 64 << 10
MAX_BYTES = 4 << 20
BIG_EVERY = 1000  # one graph in so many has gathers of up to MAX_BYTES
ORDER_SALT = 0x165667B1
LATE_SHARE = 0.5  # of the graphs: with a late rank
SPACED_SHARE = 0.25  # of the graphs: with checks between the gathers
MANY_LAUNCHES = 1 << 16  # in so many each graph has been launched, but for bad luck
RAGGED_SHARE = 0.125  # of the gathers: sizes that are no multiple of 16 bytes

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph.

    Attributes:
        index: its place in the pool.
        replays: for each replay that one launch holds, the row sizes of its gathers in 32-bit words.
        late_rank: the rank that sleeps before each replay, or None.
        spaced: outputs are checked between the gathers, not only after the third; then they are not back to back.
        big: it may hold gathers above SMALL_BYTES.
    """

    index: int
    replays: tuple[Sizes, ...]
    late_rank: int | None
    spaced: bool
    big: bool


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How many graphs, and of what size.

    Attributes:
        seed: 0 .. 2**64 - 1; everything else follows from it.
        ranks: world size.
        replays_per_graph: replays that one launch of a graph holds.
        num_small: graphs of gathers up to SMALL_BYTES.
        num_big: graphs that may hold gathers up to `max_bytes`.
        max_bytes: the largest row.
        spaced_share: share of the graphs with a check between the gathers instead of after all three.
        ragged_share: share of the gathers with a size that is no multiple of 16 bytes: misaligned rows, padded chunks.
        reserved_per_65536: how many payload words of 65,536 may not travel as they are (docs/mailbox.md R5).
    """

    seed: int
    ranks: int
    replays_per_graph: int = 1
    num_small: int = 64
    num_big: int = 8
    max_bytes: int = MAX_BYTES
    spaced_share: float = SPACED_SHARE
    ragged_share: float = RAGGED_SHARE
    reserved_per_65536: int = oracle.RESERVED_PER_65536


def shape_for(protocol: str, *, is_control: bool) -> dict[str, Any]:
    """What a protocol asks of the `PlanConfig` of a run.

    The known-bad protocol has no escapes and sends whole chunks. Its ranks soon wait in vain, so what a gather brought
    is compared at once, not two gathers later.
    """
    if protocol == "late-copy":
        return {"spaced_share": 1.0, "ragged_share": 0.0, "reserved_per_65536": 0}
    return {"spaced_share": 1.0} if is_control else {}


class Plan:
    """The graphs and their order."""

    def __init__(self, config: PlanConfig) -> None:
        if not 1 <= config.ranks <= oracle.MAX_RANKS:
            raise UsageError(f"{config.ranks} ranks: wanted 1 to {oracle.MAX_RANKS}")
        if config.max_bytes < 4 * MIN_BYTES:
            raise UsageError(f"rows of at most {config.max_bytes} bytes: wanted at least {4 * MIN_BYTES}")
        self.config = config
        self.oracle = HostOracle(config.seed, config.ranks, config.reserved_per_65536)
        self.seed_key = self.oracle.seed_key
        rng = np.random.Generator(np.random.PCG64(config.seed))
        total = config.num_small + config.num_big
        self.graphs = tuple(_draw_graph(rng, config, index, big=index >= config.num_small) for index in range(total))
        self.max_words = max(max(sizes) for graph in self.graphs for sizes in graph.replays)

    def order(self, first_launch: int, count: int) -> npt.NDArray[np.intp]:
        """(count,) pool indices of the graphs of `count` launches."""
        launch = np.arange(first_launch, first_launch + count, dtype=np.uint64)
        salted = launch.astype(np.uint32) ^ np.uint32(self.seed_key ^ ORDER_SALT)
        draw = oracle.mix(salted, np.uint32)
        which = oracle.mix(draw, np.uint32).astype(np.intp)
        small = which % self.config.num_small
        if self.config.num_big == 0:
            return small
        big = self.config.num_small + which % self.config.num_big
        return np.where(draw % np.uint32(BIG_EVERY) == 0, big, small)

    def graph_of(self, replay: int) -> GraphSpec:
        """The graph that replay number `replay` of the run belongs to."""
        return self.graphs[int(self.order(replay // self.config.replays_per_graph, 1)[0])]

    def sizes_of(self, replays: int) -> set[Sizes]:
        """Row sizes of the gathers of a run's replays, each combination once; of the first MANY_LAUNCHES alone."""
        launches, more = divmod(replays, self.config.replays_per_graph)
        whole = np.unique(self.order(0, min(launches, MANY_LAUNCHES))).tolist()
        sizes = {one for graph in whole for one in self.graphs[graph].replays}
        return sizes | set(self.graph_of(replays).replays[:more])

    def row_words(self, gather: int, replay: int) -> int:
        """32-bit words per row of a gather."""
        return self.graph_of(replay).replays[replay % self.config.replays_per_graph][gather]


def _draw_graph(rng: np.random.Generator, config: PlanConfig, index: int, *, big: bool) -> GraphSpec:
    small_bytes = min(SMALL_BYTES, config.max_bytes)
    replays = []
    for _ in range(config.replays_per_graph):
        limit = config.max_bytes if big else small_bytes
        sizes = _draw_sizes(rng, [MIN_BYTES] * oracle.GATHERS_PER_REPLAY, limit, config.ragged_share)
        if big and config.max_bytes > SMALL_BYTES:  # one of the three is big for sure
            place = int(rng.random() * len(sizes))
            sizes[place] = _draw_sizes(rng, [SMALL_BYTES + MIN_BYTES], config.max_bytes, config.ragged_share)[0]
        replays.append(tuple(sizes))
    late_rank = int(rng.random() * config.ranks) if rng.random() < LATE_SHARE else None
    return GraphSpec(index, tuple(replays), late_rank, rng.random() < config.spaced_share, big)


def _draw_sizes(rng: np.random.Generator, lowest: list[int], limit: int, ragged_share: float) -> list[int]:
    """Log-uniform row sizes in words, all different: only a change of size can show what packed rows get wrong."""
    sizes: list[int] = []
    for low in lowest:
        while True:
            exact = low * math.exp(rng.random() * math.log(limit / low)) / WORD_BYTES
            ragged = rng.random() < ragged_share
            words = round(exact) if ragged else CHUNK_WORDS * round(exact / CHUNK_WORDS)
            words = min(max(words, low // WORD_BYTES), limit // WORD_BYTES)
            if words not in sizes:
                break
        sizes.append(words)
    return sizes
