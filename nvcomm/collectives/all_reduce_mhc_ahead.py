# SPDX-License-Identifier: Apache-2.0
"""What a thread loads a row early: its chunks of the residual streams, and the row's factors.

Into registers. Shared memory would hold more rows, but a CTA that needs kilobytes of it cannot join others on a
multiprocessor that has been set up for less, and those may be waiting for it (docs/mailbox.md R8). The factors of a row
are few and the same for all threads: each lane loads one, and hands it round when its turn comes.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvcomm.collectives.all_reduce_mhc_config import WARP, MhcConfig
from nvcomm.collectives.all_reduce_mhc_rows import Boundary, Share
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import memory as ptx
from nvcomm.ptx import mma


def load_row(config: MhcConfig, work: Boundary, share: Share, row: Int32, there: Boolean, words: cute.Tensor) -> Uint32:
    """Loads a thread's chunk of each stream of a row into `words`, and returns the lane's factor of the row.

    Loads nothing where no row is `there`: words and factor are 0.
    """
    _load_streams(config, words, work.residual, row, share.chunk, share.inside & there)
    return _load_factor(config, work, row, share.thread % WARP, there)


def _load_streams(
    config: MhcConfig, words: cute.Tensor, residual: Int64, row: Int32, chunk: Int32, there: Boolean
) -> None:
    """Loads a chunk of each stream of a row into `words`; 0 where nothing is `there` to be read."""
    shape = config.shape
    for s in range(shape.num_streams):
        addr = residual + Int64(row * shape.num_streams + s) * shape.row_bytes + Int64(chunk) * CHUNK_BYTES
        for i, word in enumerate(ptx.ld_weak_v4_if(addr, there)):
            words[s * CHUNK_WORDS + i] = word


def streams_of(config: MhcConfig, words: cute.Tensor) -> list[list[Uint32]]:
    """The chunks that `load_row` loaded: one of each stream."""
    return [[words[s * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)] for s in range(config.shape.num_streams)]


def _load_factor(config: MhcConfig, work: Boundary, row: Int32, lane: Int32, there: Boolean) -> Uint32:
    """A row's factors, one in each lane: those of `post`, of `comb`, and of `pre` if there is one."""
    num_streams = config.shape.num_streams
    addr, start = Int64(0), 0
    for base, count in ((work.post, num_streams), (work.comb, num_streams * num_streams), (work.pre, num_streams)):
        here = Boolean(lane >= start) & Boolean(lane < start + count) & Boolean(base != 0) & there
        addr = addr + (base + Int64(row * count + lane - start) * 4) * Int64(here)
        start += count
    return ptx.ld_weak_b32_if(addr, Boolean(addr != 0))


def factors(factor: Uint32, first: int, count: int) -> list[Float32]:
    """The factors that lanes `first` to `first + count - 1` hold; all lanes of a warp take part."""
    return [mma.bits_f32(cute.arch.shuffle_sync(factor, offset=first + i)) for i in range(count)]
