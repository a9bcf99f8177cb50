# SPDX-License-Identifier: Apache-2.0
"""What a top-k kernel is compiled for, and where things lie in its shared memory. Pure arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["columns", "blocks"]
Pdl = Literal["off", "short", "always"]

SUPPORTED_K = (512, 1024, 2048)
MAX_ROWS = 192
MAX_COLUMNS = 1 << 20
BLOCK_COLUMNS = 8
NUM_BLOCKS_SELECTED = 2048

WARP = 32
VECTOR_BYTES = 16
VECTOR_COLUMNS = 8
UNROLL = 8  # vectors of a thread in flight together: 32 registers
# Histograms begin with the largest key of the row or CTA. Keys of one octave of BF16 are 128 apart.
GROUP_BINS = 4096  # of group maxima
EXACT_BINS = 2048  # of them, a key each; the rest 2**FAR_SHIFT keys each
FAR_SHIFT = 5
FINE_BINS = 1024  # down to the threshold
FINEST_BINS = 256  # at least 2**16 / FINE_BINS, and what a warp reads at once
ORDER_BINS = 4096  # of `topk_ordered`: the upper 12 bits of a key
SUB_BINS = 16  # the lower 4 bits
MAX_STEPS = 65536  # (step, thread) pairs of a CTA: their maxima are 16 bits each, and so are their names
WINDOW = 128  # names of hot vectors that a warp lists at once
HELD_ELEMENTS = 24576  # of a row, at most, that lanes hold in registers: all counts of a row fit 16 bits
PDL_BYTES = 30 << 20  # half of the L2 cache of an H200; see `choose_config`


@dataclass(frozen=True, slots=True)
class TopkConfig:
    """One compiled variant.

    Attributes:
        k: columns to select; in block mode the number of blocks, the pinned one included.
        cluster: CTAs of a row, a power of two up to 16.
        batches: batches of 8 steps that the widest row may take.
        threads: threads of a CTA, a power of two.
        mode: "columns", or "blocks" of 8 columns.
        deterministic: ties go to the smaller column and indices ascend.
        pdl: programmatic dependent launch: whether the next kernel may start while this one runs, behind what it waits
            for. "short": where the valid part of the buffer is small.
        stamps: for measurements: the last output row's first places get clock readings instead of indices.
    """

    k: int
    cluster: int
    batches: int = 8
    threads: int = 1024
    mode: Mode = "columns"
    deterministic: bool = False
    pdl: Pdl = "always"
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
    def step_vectors(self) -> int:
        """Vectors that the cluster reads in one step, one a thread."""
        return self.threads * self.cluster

    @property
    def held_vectors(self) -> int:
        """Hot vectors that a warp holds in registers, one a lane."""
        return min(WARP, HELD_ELEMENTS // (self.cluster * self.warps * VECTOR_COLUMNS))

    @property
    def candidate_capacity(self) -> int:
        """Candidates above the threshold that a CTA lists."""
        return min(4096, ((0xFFFF - HELD_ELEMENTS) // self.cluster - self.k) // 8 * 8)


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Byte offsets in the shared memory of a CTA. What is before `zeroed_bytes` starts as 0.

    Attributes:
        groups: GROUP_BINS words; later each warp lists WINDOW 16-bit names of vectors there.
        fine: FINE_BINS words, how many candidates of this CTA have a key.
        finest: FINEST_BINS words for the keys of one fine bin: low half all CTAs, high half the CTAs before this one.
        sub: SUB_BINS words.
        counters: 8 words.
        barriers: two mbarriers, for the bracket and for the candidates.
        slots: three words a CTA of the cluster: the bracket, what its list holds, and for `topk_ordered`.
        result: four words.
        warp_totals: two words a warp.
        maxima: BF16 maximum of each vector, 8 steps of a thread together.
        above_index, above_key, equal_index: the candidates that this CTA has listed.
        received: `fine` of each CTA of the cluster, in 16 bits a bin.
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
    result: int = slots + 3 * 16 * 4
    warp_totals: int = result + 16
    maxima: int = warp_totals + 2 * 32 * 4

    @property
    def above_index(self) -> int:
        return self.maxima + 2 * UNROLL * self.config.threads * self.config.batches

    @property
    def above_key(self) -> int:
        return self.above_index + 4 * self.config.candidate_capacity

    @property
    def equal_index(self) -> int:
        return self.above_key + 2 * self.config.candidate_capacity

    @property
    def received(self) -> int:
        return self.equal_index + 4 * self.config.k

    @property
    def total_bytes(self) -> int:
        return self.received + 2 * FINE_BINS * self.config.cluster * (self.config.cluster > 1)


def choose_config(
    rows: int, columns: int, k: int, *, mode: Mode = "columns", deterministic: bool = False, num_sms: int = 132
) -> TopkConfig:
    """The variant for a buffer of that size; the rows' lengths play no part.

    As many CTAs a row as keep all rows resident at once, at most 8; with more rows than multiprocessors some rows wait.
    With one CTA of 1,024 threads on a multiprocessor, an H200 holds 15 clusters of 8 and 30 of 4 at once: a graphics
    processing cluster (GPC) of 16 to 18 multiprocessors holds two of 8, and some hold less. The widest rows need two
    CTAs to hold their maxima.

    Programmatic dependent launch saves half a microsecond, but places clusters wherever multiprocessors come free. From
    call to call a row then changes sides of the L2 cache, and what fits the cache once stops fitting: where much is
    valid kernels go without, as long as the grid leaves multiprocessors free to change to. Measured in
    docs/results/topk.md.
    """
    cluster = 8
    while cluster > 1 and rows * cluster > (num_sms if cluster == 2 else num_sms - num_sms // 11):
        cluster //= 2
    # Fewer warps wait for each other and repeat less of the work that each does for itself; more load more.
    threads = 512 if cluster == 8 or (cluster == 4 and columns <= 524_288) else 1024
    vectors = -(-columns // VECTOR_COLUMNS)
    if vectors > cluster * MAX_STEPS:
        cluster = 2
    batches = 1
    while batches * UNROLL * threads * cluster < vectors:
        batches *= 2
    pdl: Pdl = "always" if 2 * rows * columns <= PDL_BYTES or rows * cluster > num_sms - num_sms // 11 else "short"
    return TopkConfig(k, cluster, batches=batches, threads=threads, mode=mode, deterministic=deterministic, pdl=pdl)
