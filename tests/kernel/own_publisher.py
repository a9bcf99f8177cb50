# SPDX-License-Identifier: Apache-2.0
"""A kernel that publishes its own result, as the epilogue of a GEMM would: `PublishTarget` taken at its word."""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit
from nvcomm.collectives.all_reduce_mhc_config import PublishTarget
from nvcomm.mailbox import CHUNK_BYTES, ESCAPE
from nvcomm.ptx import memory as ptx

THREADS = 128


class OwnPublisher:
    """Stores a tensor, 16 bytes a thread, where `collect` looks for it; a plain launch."""

    @cute.jit
    def __call__(
        self,
        x: Int64,
        peers: list[Int64],
        state: Int64,
        slot_bytes: Int64,
        row_offset: Int64,
        chunks: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        self.kernel(x, peers, state, slot_bytes, row_offset, chunks).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, preferred_smem_carveout=-1
        )

    @cute.kernel
    def kernel(
        self, x: Int64, peers: list[Int64], state: Int64, slot_bytes: Int64, row_offset: Int64, chunks: Int32
    ) -> None:
        chunk = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if chunk < chunks:
            slot = ptx.ld_relaxed_gpu(state)
            words = ptx.ld_weak_v4(x + Int64(chunk) * CHUNK_BYTES)
            sent = [word ^ (Uint32((word | Uint32(1)) == Uint32(ESCAPE)) << Uint32(31)) for word in words]
            at = Int64(slot) * slot_bytes + row_offset + Int64(chunk) * CHUNK_BYTES
            for peer in peers:
                ptx.st_relaxed_sys_v4(peer + at, sent)


def load(world_size: int) -> jit.CompiledKernel:
    """Compiles and loads it; waits for the device (docs/mailbox.md R9)."""
    peers = [Int64(0)] * world_size
    args = (Int64(0), peers, Int64(0), Int64(0), Int64(0), Int32(0), Int32(1), make_fake_stream())
    kernel = jit.compile_kernel(OwnPublisher(), *args, key=(world_size,))
    jit.preload(kernel)
    return kernel


def publish(kernel: jit.CompiledKernel, x_ptr: int, num_bytes: int, target: PublishTarget, stream: int) -> None:
    """Publishes a contribution of whole chunks."""
    chunks = num_bytes // CHUNK_BYTES
    ctas = -(-chunks // THREADS)
    kernel(
        x_ptr, list(target.peers), target.state, target.slot_bytes, target.row_offset, chunks, ctas, stream
    )  # fmt: skip
