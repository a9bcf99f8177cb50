# SPDX-License-Identifier: Apache-2.0
"""All-reduce LL: every rank publishes its contribution to all, and each sums all of it.

A thread owns a chunk of 16 bytes, and every chunk that follows at a distance of the grid's threads. It publishes them
into row `rank` of every mailbox, at the places an all-gather would use, then collects the same chunks of all rows of
its own mailbox, its own row included (R2), clears them (R3), adds them in the order of R13 and rounds once:

    input   [ chunk 0 | chunk 1 | ... ]            rank's contribution
    mailbox [ row 0: chunk 0 | ... ] [ row 1 ] ... slot of this call, rows at fixed places
    output  [ chunk 0 | chunk 1 | ... ]            the sum of the rows

Every rank adds the same words in the same order, so all find the same bits. Order of memory: as in the all-gather
(`all_gather.py`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from nvcomm import device, mailbox
from nvcomm.collectives import turn
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_tree import sendable, sum_rows
from nvcomm.collectives.mailbox_kernel import MailboxKernel, Transfer
from nvcomm.collectives.tensors import load_chunk, store_chunk
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_WORDS
from nvcomm.ptx import memory as ptx


class AllReduceLLKernel(MailboxKernel):
    """The LL all-reduce of one `ReduceConfig`."""

    config: ReduceConfig

    @cute.kernel
    def kernel(self, work: Transfer, handle: Handle, call: Call) -> None:
        config = self.config
        inp, out, num_bytes = work
        at = turn.begin(config, handle, call)
        step, first = at.stride, at.index
        num_chunks = (num_bytes + (mailbox.CHUNK_BYTES - 1)) // mailbox.CHUNK_BYTES
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)
        # in flight together with the state: one memory latency less before the first store
        ahead = self.load(inp, first, num_chunks, num_bytes)
        box = turn.open_box(config, handle, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        chunk = first
        while chunk < num_chunks:
            words = ahead
            chunk += step
            if chunk < num_chunks:
                ahead = self.load(inp, chunk, num_chunks, num_bytes)
            if live:
                device.publish_words(
                    box, box.row(box.rank) + Int64(chunk - step) * mailbox.CHUNK_BYTES, sendable(words)
                )
        last = turn.arrive(box, at)
        wait = device.new_wait()
        turn.compare(config, box, call, num_bytes, Boolean(first < WARP) & live, wait)
        chunk = first
        while chunk < num_chunks:
            if live:
                self.collect(box, out, chunk, num_bytes, wait)
            else:
                store_chunk(out, chunk, num_bytes, config.access_bytes, [Uint32(device.FILL)] * CHUNK_WORDS)
            chunk += step
        turn.end(config, box, at, num_bytes, last, broken)

    def load(
        self, inp: Int64, chunk: Int32, num_chunks: Int32, num_bytes: Int32
    ) -> tuple[Uint32, Uint32, Uint32, Uint32]:
        """A chunk of the input; threads beyond the end load the last one, and publish nothing."""
        return load_chunk(inp, cutlass.min(chunk, num_chunks - 1), num_bytes, self.config.access_bytes)

    @cute.jit
    def collect(self, box: Mailbox, out: Int64, chunk: Int32, num_bytes: Int32, wait: cute.Tensor) -> None:
        """A thread collects a chunk of every row, clears it, and writes the sum out."""
        config = self.config
        num_words = config.world_size * CHUNK_WORDS
        words = cute.make_rmem_tensor(num_words, Uint32)
        addr = box.own + box.row(0) + Int64(chunk) * mailbox.CHUNK_BYTES
        if const_expr(config.spin):
            device.collect_chunk(box, words, addr, chunk, 0, config.world_size, wait)
        else:
            device.load_rows(words, addr, config.layout.row_bytes, config.world_size)
        device.clear_chunk(box, addr, config.world_size)
        total = sum_rows([words[i] for i in range(num_words)], config.world_size, config.dtype)
        store_chunk(out, chunk, num_bytes, config.access_bytes, total)
