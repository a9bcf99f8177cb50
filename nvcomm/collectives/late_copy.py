# SPDX-License-Identifier: Apache-2.0
"""`late-copy`: the widely used Lamport all-gather, known to be wrong; the negative control of tests and stress.

Three habits, each harmless alone (docs/mailbox.md R2, R3), the same as in `nvcomm.host.late_copy`:

- rows are packed by the call's size, so the place of a word belongs to another rank in a call of another size;
- the own row is taken from registers, and its place cleared without having been seen;
- so the own copy may still be on its way when its place is cleared. Between streams of one GPU it never is: here it
  is held back in a stash, and stored at the end of the next call. On the delayed transport it is late by itself.

Such a copy lands behind the clear, and two calls later it is read as a word of another rank.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr, range_constexpr

from nvcomm import device, mailbox
from nvcomm.collectives import turn
from nvcomm.collectives.all_gather import AllGatherConfig
from nvcomm.collectives.mailbox_kernel import MailboxKernel, Transfer
from nvcomm.collectives.tensors import load_chunk, store_chunk
from nvcomm.device import Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, MailboxLayout
from nvcomm.outbox import post
from nvcomm.ptx import memory as ptx

# The stash: the number of chunks that each slot's call carried, then those chunks.
STASH_HEADER_BYTES = 128


def stash_bytes(layout: MailboxLayout) -> int:
    """Bytes of device memory, zeroed, that a rank's STATE_OUTBOX must point to."""
    return STASH_HEADER_BYTES + mailbox.NUM_SLOTS * layout.row_bytes


class LateCopyKernel(MailboxKernel):
    """The known-bad protocol, whole; launched like `AllGatherKernel`. Sizes that are multiples of 16 bytes only."""

    config: AllGatherConfig

    @cute.kernel
    def kernel(self, work: Transfer, handle: Handle, call: Call) -> None:
        inp, out, num_bytes = work
        state, peers, rank = handle.state, handle.peers, handle.rank
        at = turn.place(self.config)
        if const_expr(self.config.pdl != "off"):
            cute.arch.griddepcontrol_wait()
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(state)
        layout = self.config.layout
        box = Mailbox(layout, False, handle, slot, generation, None)
        stash = device.outbox_of(state)
        num_chunks = num_bytes // CHUNK_BYTES
        first, step = at.index, at.stride
        previous = Uint32(mailbox.next_slot(slot))  # of two slots the next is the previous
        if broken == 0:
            base = Int64(slot) * layout.slot_bytes
            wait = device.new_wait()
            chunk = first
            while chunk < num_chunks:
                words = load_chunk(inp, chunk, num_bytes, CHUNK_BYTES)
                packed = base + Int64(rank * num_chunks + chunk) * CHUNK_BYTES
                if const_expr(self.config.delayed):
                    for i in range_constexpr(len(peers)):
                        post(stash, peers[i] + packed, words)
                else:
                    for i in range_constexpr(1, len(peers)):
                        ptx.st_relaxed_sys_v4(peers[i] + packed, words)
                    ptx.st_relaxed_sys_v4(self.stashed(stash, slot, chunk), words)
                chunk += step
            chunk = first
            while chunk < num_chunks:
                self.collect(box, inp, out, base, chunk, num_chunks, num_bytes, wait)
                chunk += step
            held = Int32(0)
            if const_expr(not self.config.delayed):
                held = Int32(ptx.ld_relaxed_gpu(stash + Int64(previous) * 4))
            chunk = first
            while chunk < held:  # the previous call's own copy, behind the clear of its place
                words = ptx.ld_relaxed_sys_v4(self.stashed(stash, previous, chunk))
                late = Int64(previous) * layout.slot_bytes + Int64(rank * held + chunk) * CHUNK_BYTES
                ptx.st_relaxed_sys_v4(box.own + late, words)
                chunk += step
        cute.arch.fence_acq_rel_sys()
        cute.arch.sync_threads()
        if at.thread == 0:
            arrived = ptx.atom_add_acq_rel_gpu(state + mailbox.STATE_ARRIVED * 4, Uint32(1))
            if arrived == Uint32(at.num_ctas - 1):
                ptx.st_relaxed_gpu(state + mailbox.STATE_ARRIVED * 4, Uint32(0))
                if const_expr(not self.config.delayed):
                    ptx.st_relaxed_gpu(stash + Int64(slot) * 4, Uint32(num_chunks))
                if broken == 0:
                    ptx.st_relaxed_gpu(state + mailbox.STATE_SLOT * 4, previous)
                    ptx.st_relaxed_gpu(state + mailbox.STATE_GENERATION * 4, generation + Uint32(1))
                    ptx.red_add_relaxed_gpu_u64(state + mailbox.STATE_BYTES * 4, Uint64(num_bytes))

    def stashed(self, stash: Int64, slot: Uint32, chunk: Int32) -> Int64:
        """Where a chunk of the own copy of `slot` is held back."""
        row = Int64(slot) * self.config.layout.row_bytes
        return stash + STASH_HEADER_BYTES + row + Int64(chunk) * CHUNK_BYTES

    @cute.jit
    def collect(
        self,
        box: Mailbox,
        inp: Int64,
        out: Int64,
        base: Int64,
        chunk: Int32,
        num_chunks: Int32,
        num_bytes: Int32,
        wait: cute.Tensor,
    ) -> None:
        """Collects the others' rows, takes the own one from the input, and clears all of them."""
        for src_rank in range_constexpr(self.config.layout.world_size):
            addr = box.own + base + Int64(src_rank * num_chunks + chunk) * CHUNK_BYTES
            words = cute.make_rmem_tensor(CHUNK_WORDS, Uint32)
            if Boolean(box.rank == src_rank):
                own = load_chunk(inp, chunk, num_bytes, CHUNK_BYTES)
                for i in range_constexpr(CHUNK_WORDS):
                    words[i] = own[i]
            else:
                device.collect_chunk(box, words, addr, chunk, src_rank, 1, wait)
            device.clear_chunk(box, addr, 1)
            row = out + Int64(src_rank) * Int64(num_bytes)
            store_chunk(row, chunk, num_bytes, CHUNK_BYTES, [words[i] for i in range(CHUNK_WORDS)])
