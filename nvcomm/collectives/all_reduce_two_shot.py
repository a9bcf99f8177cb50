# SPDX-License-Identifier: Apache-2.0
"""All-reduce two-shot: contributions go to the owner of a chunk, who sums once and publishes the result to all.

One generation (docs/mailbox.md R12). Owners alternate every 32 chunks, `owner(i) = i // 32 % world_size`, whatever the
size of the call. The contribution of rank r to chunk i lies in the owner's mailbox, row r, at chunk i's place; its
result in every mailbox, row owner(i), at the same place. So each word is written once, and by one rank:

    owner's mailbox      row r      [ ... contribution of r to chunk i ... ]     r != owner
    every mailbox        row owner  [ ... result of chunk i ............... ]

A warp takes spans of 32 * world_size chunks, a chunk of each owner for every thread, and goes three times over them:
it sends what others own; it collects what it owns, adds its own contribution from registers and publishes the sum; it
collects every result, the own ones included (R2). Each time it clears what it collected (R3).

Nobody starves (R8): sending waits for nobody, summing waits for senders, and results wait for summing. All wait for all
(R12): every result had an owner who waited for every rank. Bits are those of LL: one tree, one rounding (R13).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import device, mailbox
from nvcomm.collectives import turn
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_owners import Owners
from nvcomm.collectives.all_reduce_rows import collect_rows, waiting_for_sums
from nvcomm.collectives.all_reduce_source import TensorSource
from nvcomm.collectives.mailbox_kernel import MailboxKernel, Transfer
from nvcomm.collectives.tensors import store_chunk
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import memory as ptx


class AllReduceTwoShotKernel(MailboxKernel):
    """The two-shot all-reduce of one `ReduceConfig`."""

    config: ReduceConfig

    def __init__(self, config: ReduceConfig) -> None:
        super().__init__(config)
        self.owners = Owners(config, config.threads)

    @cute.kernel
    def kernel(self, work: Transfer, handle: Handle, call: Call) -> None:
        config = self.config
        inp, out, num_bytes = work
        at = turn.begin(config, handle, call)
        spans = self.owners.spans(at)
        num_chunks = (num_bytes + (CHUNK_BYTES - 1)) // CHUNK_BYTES
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)
        ahead = self.owners.registers()
        source = TensorSource(inp, num_bytes, config.access_bytes)
        self.owners.load(ahead, source, spans.first, num_chunks, handle.rank)  # in flight together with the state
        box = turn.open_box(config, handle, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        self.owners.send_all(box, spans, ahead, source, num_chunks, live)
        last = turn.arrive(box, at)
        wait = device.new_wait()
        turn.compare(config, box, call, num_bytes, Boolean(at.index < WARP) & live, wait)
        self.owners.sum_all(box, spans, source, num_chunks, live, wait)
        chunk = spans.first
        while chunk < num_chunks:
            if live:
                self.collect(box, out, chunk, num_chunks, num_bytes, wait)
            else:
                self.fill(out, chunk, num_chunks, num_bytes)
            chunk += spans.step
        turn.end(config, box, at, num_bytes, last, broken)

    @cute.jit
    def collect(
        self, box: Mailbox, out: Int64, chunk: Int32, num_chunks: Int32, num_bytes: Int32, wait: cute.Tensor
    ) -> None:
        """Collects a result of every owner, clears it and writes it out."""
        config = self.config
        words = cute.make_rmem_tensor(config.world_size * CHUNK_WORDS, Uint32)
        base = box.own + Int64(chunk) * CHUNK_BYTES
        addrs = tuple(base + box.row(r) + r * (WARP * CHUNK_BYTES) for r in range(config.world_size))
        wanted = tuple(Boolean(chunk + r * WARP < num_chunks) for r in range(config.world_size))
        collect_rows(
            waiting_for_sums(box), words, addrs, wanted, (Uint32(0),) * CHUNK_WORDS, chunk, WARP, wait, config.spin
        )
        for r in range_constexpr(config.world_size):
            if wanted[r]:
                ptx.st_relaxed_sys_v4(addrs[r], (Uint32(mailbox.EMPTY),) * CHUNK_WORDS)
                result = [words[r * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)]
                store_chunk(out, chunk + r * WARP, num_bytes, config.access_bytes, result)

    @cute.jit
    def fill(self, out: Int64, chunk: Int32, num_chunks: Int32, num_bytes: Int32) -> None:
        """Fills a thread's chunks of the output: the communicator is broken (R10)."""
        for r in range_constexpr(self.config.world_size):
            if chunk + r * WARP < num_chunks:
                filling = [Uint32(device.FILL)] * CHUNK_WORDS
                store_chunk(out, chunk + r * WARP, num_bytes, self.config.access_bytes, filling)
