# SPDX-License-Identifier: Apache-2.0
"""All-gather: every rank receives every rank's bytes, in one kernel.

A warp owns 32 consecutive chunks of 16 bytes, the span of one escape record, and every `num_warps`-th such span after
it. It publishes all of its chunks into row `rank` of every mailbox, then collects the same chunks of all rows of its
own mailbox, its own row included (R2), writes them out and clears them (R3):

    input   [ span 0 | span 1 | ... ]              rank's bytes
    mailbox [ row 0: span 0 | ... ] [ row 1 ] ...  slot of this call, rows at fixed places
    output  [ rank 0's bytes ][ rank 1's bytes ]   rows follow each other with no gap

Order. No fence stands between publish and collect: each word is its own flag (R4). The grid waits for the kernel
before it (`griddepcontrol.wait`) before it reads the state or stores into any mailbox (R1 i); the last CTA to arrive
steps slot and generation (R6), and the trigger for the next kernel comes behind a fence after the last store of any
kind (R1 ii), or right after the wait where the caller promises that the next kernel waits too (R1 iii).
All CTAs of all ranks are resident at once (R8): the launch sees to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import device, mailbox
from nvcomm.collectives import turn
from nvcomm.collectives.mailbox_kernel import MailboxKernel, Transfer
from nvcomm.collectives.tensors import load_chunk, store_chunk
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_WORDS, MailboxLayout
from nvcomm.options import Pdl
from nvcomm.ptx import memory as ptx


@dataclass(frozen=True, slots=True)
class AllGatherConfig:
    """What an all-gather kernel is compiled for.

    Attributes:
        layout: the mailbox.
        access_bytes: width of accesses to input and output.
        multicast: publish with one multicast store instead of one store per rank.
        pdl, threads, device_checks, delayed: see `KernelConfig`.
    """

    layout: MailboxLayout
    access_bytes: int = 16
    multicast: bool = False
    pdl: Pdl = "safe"
    threads: int = 256
    device_checks: bool = False
    delayed: bool = False

    @property
    def rows_in_flight(self) -> int:
        """Rows whose loads are in flight together: more would spill registers."""
        return min(self.layout.world_size, 4)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit one multiprocessor whatever the compiler does: 1,024 threads of 64 registers, 512 of 128."""
        return (1024 if self.layout.world_size <= 4 else 512) // self.threads


class AllGatherKernel(MailboxKernel):
    """The all-gather of one `AllGatherConfig`."""

    config: AllGatherConfig

    @cute.kernel
    def kernel(self, work: Transfer, handle: Handle, call: Call) -> None:
        config = self.config
        inp, out, num_bytes = work
        at = turn.begin(config, handle, call)
        lane = at.thread % WARP
        step, first = at.stride, at.index
        num_chunks = (num_bytes + (mailbox.CHUNK_BYTES - 1)) // mailbox.CHUNK_BYTES
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)
        # in flight together with the state: one memory latency less before the first store
        ahead = self.load(inp, first, num_chunks, num_bytes)
        box = turn.open_box(config, handle, slot, generation)
        # A broken communicator publishes nothing (R10). Not a branch around the loop: the compiler would move the loads
        # behind it, and so behind the state's arrival.
        live = Boolean(broken == 0)
        # `chunk - lane` is the first chunk of the warp's span: loops are uniform over a warp, so votes see all lanes
        chunk = first
        while chunk - lane < num_chunks:
            words = ahead
            chunk += step
            if chunk - lane < num_chunks:
                ahead = self.load(inp, chunk, num_chunks, num_bytes)
            device.publish_chunk(box, box.row(box.rank), chunk - step, words, live & (chunk - step < num_chunks))
        last = turn.arrive(box, at)
        if live:
            wait = device.new_wait()
            turn.compare(config, box, call, num_bytes, Boolean(first - lane == 0), wait)
            chunk = first
            while chunk - lane < num_chunks:
                self.collect(box, out, chunk, num_chunks, num_bytes, wait)
                chunk += step
        else:
            chunk = first
            while chunk < num_chunks:
                self.fill(out, chunk, num_bytes)
                chunk += step
        turn.end(config, box, at, num_bytes, last, broken)

    def load(
        self, inp: Int64, chunk: Int32, num_chunks: Int32, num_bytes: Int32
    ) -> tuple[Uint32, Uint32, Uint32, Uint32]:
        """A chunk of the input; lanes beyond the end load the last one, and publish nothing."""
        return load_chunk(inp, cutlass.min(chunk, num_chunks - 1), num_bytes, self.config.access_bytes)

    @cute.jit
    def collect(
        self, box: Mailbox, out: Int64, chunk: Int32, num_chunks: Int32, num_bytes: Int32, wait: cute.Tensor
    ) -> None:
        """A warp collects its 32 chunks of every row, clears them and writes them out."""
        world_size, rows_in_flight = self.config.layout.world_size, self.config.rows_in_flight
        active = Boolean(chunk < num_chunks)
        for src_rank in range_constexpr(0, world_size, rows_in_flight):
            num_rows = min(rows_in_flight, world_size - src_rank)
            words = cute.make_rmem_tensor(num_rows * CHUNK_WORDS, Uint32)
            addr = box.own + box.row(src_rank) + Int64(chunk) * mailbox.CHUNK_BYTES
            if active:
                device.collect_chunk(box, words, addr, chunk, src_rank, num_rows, wait)
                device.clear_chunk(box, addr, num_rows)
            else:
                words.fill(Uint32(0))
            cute.arch.sync_warp()  # R4: no vote while lanes still poll
            if cute.arch.vote_any_sync(device.any_equals(words, mailbox.ESCAPE, num_rows * CHUNK_WORDS)):
                device.restore_escapes(box, words, chunk, src_rank, num_rows, active, wait)
            if active:
                for r in range_constexpr(num_rows):
                    row = out + Int64(src_rank + r) * Int64(num_bytes)
                    row_words = [words[r * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)]
                    store_chunk(row, chunk, num_bytes, self.config.access_bytes, row_words)

    @cute.jit
    def fill(self, out: Int64, chunk: Int32, num_bytes: Int32) -> None:
        """Fills a chunk of every output row: the communicator is broken (R10)."""
        for r in range_constexpr(self.config.layout.world_size):
            row = out + Int64(r) * Int64(num_bytes)
            store_chunk(row, chunk, num_bytes, self.config.access_bytes, [Uint32(device.FILL)] * CHUNK_WORDS)
