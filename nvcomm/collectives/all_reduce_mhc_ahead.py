# SPDX-License-Identifier: Apache-2.0
"""What a thread loads ahead: its chunks of the residual streams, two rows early, and the row's factors, one row early.

The streams go into shared memory by asynchronous copies, each thread's chunks into places of its own, so that nobody
waits for anybody; registers would not hold them. The factors of a row are few and the same for all threads: each lane
loads one, and hands it round when its turn comes.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.mailbox import CHUNK_BYTES
from nvcomm.ptx import cluster, mma
from nvcomm.ptx import memory as ptx

STAGES = 2  # rows under way


def shared_bytes(config: MhcConfig) -> int:
    """Bytes of shared memory that a CTA needs."""
    return STAGES * _stage_bytes(config)


def _stage_bytes(config: MhcConfig) -> int:
    return config.shape.num_streams * config.threads * CHUNK_BYTES


def _place(config: MhcConfig, base: Uint32, stage: Uint32, thread: Int32) -> Uint32:
    return base + stage * Uint32(_stage_bytes(config)) + Uint32(thread) * Uint32(CHUNK_BYTES)


def fetch(
    config: MhcConfig,
    base: Uint32,
    stage: Uint32,
    thread: Int32,
    residual: Int64,
    row: Int32,
    chunk: Int32,
    there: Boolean,
) -> None:
    """Starts a row's copies, if it is `there`; one group either way, so that groups count rows."""
    shape = config.shape
    place = _place(config, base, stage, thread)
    num_bytes = Int32(there) * CHUNK_BYTES
    for s in range(shape.num_streams):
        # an address inside the tensor, although nothing is read there
        offset = Int64(row * shape.num_streams + s) * shape.row_bytes + Int64(chunk) * CHUNK_BYTES
        addr = residual + offset * Int64(there)
        mma.cp_async_16_zfill(Int32(place + Uint32(s * config.threads * CHUNK_BYTES)), addr, num_bytes)
    mma.cp_async_commit_group()


def take(config: MhcConfig, base: Uint32, stage: Uint32, thread: Int32) -> list[tuple[Uint32, ...]]:
    """The oldest row's chunks, once they are there: one of each stream."""
    mma.cp_async_wait_group(STAGES - 1)
    place = _place(config, base, stage, thread)
    offsets = [Uint32(s * config.threads * CHUNK_BYTES) for s in range(config.shape.num_streams)]
    return [cluster.ld_shared_v4(place + offset) for offset in offsets]


def load_factor(
    config: MhcConfig, post: Int64, comb: Int64, pre: Int64, row: Int32, lane: Int32, there: Boolean
) -> Uint32:
    """A row's factors, one in each lane: those of `post`, of `comb`, and of `pre` if there is one."""
    num_streams = config.shape.num_streams
    addr, start = Int64(0), 0
    for base, count in ((post, num_streams), (comb, num_streams * num_streams), (pre, num_streams)):
        here = Boolean(lane >= start) & Boolean(lane < start + count) & Boolean(base != 0) & there
        addr = addr + (base + Int64(row * count + lane - start) * 4) * Int64(here)
        start += count
    return ptx.ld_weak_b32_if(addr, Boolean(addr != 0))


def factors(factor: Uint32, first: int, count: int) -> list[Float32]:
    """The factors that lanes `first` to `first + count - 1` hold; all lanes of a warp take part."""
    return [mma.bits_f32(cute.arch.shuffle_sync(factor, offset=first + i)) for i in range(count)]


def drain() -> None:
    """Waits for all copies: none may be under way when the CTA gives its shared memory back."""
    mma.cp_async_wait_group(0)
