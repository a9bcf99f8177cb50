# SPDX-License-Identifier: Apache-2.0
"""What a top-k kernel is compiled for, and where things lie in its shared memory. Pure arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["columns", "blocks"]

SUPPORTED_K = (512, 1024, 2048)
MAX_ROWS = 192
MAX_COLUMNS = 1 << 20
BLOCK_COLUMNS = 8
NUM_BLOCKS_SELECTED = 2048

WARP = 32
VECTOR_BYTES = 16
VECTOR_COLUMNS = 8
UNROLL = 8  # vectors of a thread in flight together: 32 registers
GROUP_BINS = 4096  # bins of the first histogram: the upper 12 bits of a key
SUB_BINS = 16  # the lower 4 bits
FINE_BINS = 1024  # bins over [threshold, largest key]; keys of one octave of BF16 are 128 apart
FINEST_BINS = 64  # 2**16 / FINE_BINS
HOT_CAPACITY = GROUP_BINS * 4 // 2  # 16-bit entries over the first histogram, which is done with by then


@dataclass(frozen=True, slots=True)
class TopkConfig:
    """One compiled variant.

    Attributes:
        k: columns to select; in block mode the number of blocks, the pinned one included.
        cluster: CTAs of a row, a power of two up to 16.
        threads: threads of a CTA, a power of two.
        mode: "columns", or "blocks" of 8 columns.
        deterministic: ties go to the smaller column and indices ascend.
        pdl: programmatic dependent launch.
        stamps: for measurements: the last output row's first places get clock readings instead of indices.
    """

    k: int
    cluster: int
    threads: int = 1024
    mode: Mode = "columns"
    deterministic: bool = False
    pdl: bool = True
    stamps: bool = False

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def quota(self) -> int:
        """Groups of a CTA that have to reach its threshold: over the cluster they make at least k."""
        return -(-self.k // self.cluster)

    @property
    def groups_per_thread(self) -> int:
        """Twice as many groups as the quota: with fewer, the k-th largest group maximum is a poor lower bound."""
        groups = 1
        while groups < UNROLL and groups * self.threads < 2 * self.quota:
            groups *= 2
        return groups

    @property
    def accumulators(self) -> int:
        """Registers with two running maxima each: a column group has one half, a block group a whole register."""
        return self.groups_per_thread if self.mode == "blocks" else max(1, self.groups_per_thread // 2)

    @property
    def step_vectors(self) -> int:
        """Vectors that the cluster reads in one step, one a thread."""
        return self.threads * self.cluster

    @property
    def max_batches(self) -> int:
        """Batches of UNROLL steps that the widest row takes."""
        return -(-(MAX_COLUMNS // VECTOR_COLUMNS) // (self.step_vectors * UNROLL))

    @property
    def candidate_capacity(self) -> int:
        """Candidates above the threshold that a CTA keeps.

        Those of the cluster, and k equal elements of each CTA, are counted in 16 bits.
        """
        return min(4096, (0xFFFF // self.cluster - self.k) // 8 * 8)


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Byte offsets in the shared memory of a CTA. What is before `zeroed_bytes` starts as 0.

    Attributes:
        groups: GROUP_BINS words, later the list of hot (batch, thread) pairs.
        fine: FINE_BINS words, the cluster's candidates: low half all CTAs, high half the CTAs before this one.
        finest: FINEST_BINS words, the same for the bin of the threshold.
        sub: SUB_BINS words.
        counters: 8 words: hot pairs, candidates above and at the threshold, positions above and at it, overflow.
        barriers: two mbarriers, for the bracket and for the candidates.
        slots: two words a CTA of the cluster.
        warp_totals: two words a warp.
        found: four words.
        batch_keys: 16-bit key of the maximum of a (batch, thread).
        above_index, above_key, equal_index: the candidates.
    """

    config: TopkConfig

    groups: int = 0
    fine: int = GROUP_BINS * 4
    finest: int = fine + FINE_BINS * 4
    sub: int = finest + FINEST_BINS * 4
    counters: int = sub + SUB_BINS * 4
    zeroed_bytes: int = counters + 32
    barriers: int = zeroed_bytes
    slots: int = barriers + 16
    warp_totals: int = slots + 2 * 16 * 4
    found: int = warp_totals + 2 * 32 * 4
    batch_keys: int = found + 16

    @property
    def above_index(self) -> int:
        return self.batch_keys + 2 * self.config.threads * self.config.max_batches

    @property
    def above_key(self) -> int:
        return self.above_index + 4 * self.config.candidate_capacity

    @property
    def equal_index(self) -> int:
        return self.above_key + 2 * self.config.candidate_capacity

    @property
    def total_bytes(self) -> int:
        return self.equal_index + 4 * self.config.k


def choose_cluster(rows: int, num_sms: int = 132) -> int:
    """CTAs a row: as many as keep all rows resident at once, at most 8.

    With one CTA of 1,024 threads on a multiprocessor, an H200 holds 15 clusters of 8 and 30 of 4 at once: a graphics
    processing cluster (GPC) of 16 to 18 multiprocessors holds two of 8, and some hold less.
    """
    for cluster in (8, 4, 2):
        if rows * cluster <= num_sms - num_sms // 11:
            return cluster
    return 2 if rows * 2 <= num_sms else 1
