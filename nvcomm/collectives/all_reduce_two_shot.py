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

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import device, mailbox
from nvcomm.collectives import all_reduce_turn as turn
from nvcomm.collectives.all_reduce_call import begin, compare, end, open_box, send_words
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_rows import collect_rows, owner_of
from nvcomm.collectives.all_reduce_source import Source, TensorSource
from nvcomm.collectives.all_reduce_tree import sendable, sum_rows
from nvcomm.collectives.tensors import store_chunk
from nvcomm.device import WARP, Mailbox
from nvcomm.device_checks import CallWords
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import memory as ptx


class AllReduceTwoShotKernel:
    """The two-shot all-reduce of one `ReduceConfig`."""

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config
        self.span = WARP * config.world_size

    @cute.jit
    def __call__(
        self,
        inp: Int64,
        out: Int64,
        peers: list[Int64],
        multicast_ptr: Int64,
        state: Int64,
        fault_record: Int64,
        timeout_ns: Int64,
        num_bytes: Int32,
        rank: Int32,
        site: Uint32,
        kind: Uint32,
        tag: Uint32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launches the kernel on `num_bytes` of input and output; the rest as for the all-gather."""
        self.kernel(
            inp, out, peers, multicast_ptr, state, fault_record, timeout_ns, num_bytes, rank, site, kind, tag
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=-1,  # the driver's default; left out, the compiler asks the driver for a GPU
            use_pdl=self.config.pdl != "off",
        )

    @cute.kernel
    def kernel(
        self,
        inp: Int64,
        out: Int64,
        peers: list[Int64],
        multicast_ptr: Int64,
        state: Int64,
        fault_record: Int64,
        timeout_ns: Int64,
        num_bytes: Int32,
        rank: Int32,
        site: Uint32,
        kind: Uint32,
        tag: Uint32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        call = CallWords(site, kind, num_bytes, tag)
        begin(config, config.pdl == "early", state, fault_record, rank, thread, call)
        step = num_ctas * (config.threads // WARP) * self.span
        first = (cta * (config.threads // WARP) + thread // WARP) * self.span + thread % WARP
        num_chunks = (num_bytes + (CHUNK_BYTES - 1)) // CHUNK_BYTES
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(state)
        ahead = cute.make_rmem_tensor(max(config.world_size - 1, 1) * CHUNK_WORDS, Uint32)
        source = TensorSource(inp, num_bytes, config.access_bytes)
        self.load(ahead, source, first, num_chunks, rank)  # in flight together with the state
        box = open_box(config, rank, peers, multicast_ptr, state, fault_record, timeout_ns, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        chunk = first
        while chunk < num_chunks:
            self.send(box, ahead, chunk, num_chunks, rank, live, 1, config.world_size)
            chunk += step
            if chunk < num_chunks:
                self.load(ahead, source, chunk, num_chunks, rank)
        last = turn.arrive(state, thread, num_ctas)
        wait = cute.make_rmem_tensor(1, Int64)
        wait[0] = Int64(0)
        compare(config, box, call, Boolean(cta * config.threads + thread < WARP), live, wait)
        chunk = first
        while chunk < num_chunks:
            owned = chunk + rank * WARP
            if live & (owned < num_chunks):
                self.reduce(box, source, owned, rank, wait)
            chunk += step
        chunk = first
        while chunk < num_chunks:
            if live:
                self.collect(box, out, chunk, num_chunks, num_bytes, wait)
            else:
                self.fill(out, chunk, num_chunks, num_bytes)
            chunk += step
        end(config, state, slot, generation, num_bytes, last, broken, thread, num_ctas)

    def load(
        self,
        words: cute.Tensor,
        source: Source,
        chunk: Int32,
        num_chunks: Int32,
        rank: Int32,
        following: Sequence[int] | None = None,
    ) -> None:
        """A thread's chunks that others own; beyond the end the last chunk, which is not sent.

        `following` says which owners, counted from this rank on; default: all others.
        """
        for k in following or range(1, self.config.world_size):
            place = cutlass.min(chunk + owner_of(rank, k, self.config.world_size) * WARP, num_chunks - 1)
            for i, word in enumerate(source.chunk(place)):
                words[(k - 1) * CHUNK_WORDS + i] = word

    @cute.jit
    def send(
        self,
        box: Mailbox,
        words: cute.Tensor,
        chunk: Int32,
        num_chunks: Int32,
        rank: Int32,
        live: Boolean,
        start: cutlass.Constexpr,
        stop: cutlass.Constexpr,
    ) -> None:
        """Sends contributions, each to the owner of its chunk: the owners `start` to `stop - 1` ranks from this one."""
        for k in range_constexpr(start, stop):
            place = chunk + owner_of(rank, k, self.config.world_size) * WARP
            if live & (place < num_chunks):
                sent = sendable([words[(k - 1) * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)])
                send_words(box, k, box.row(rank) + Int64(place) * CHUNK_BYTES, sent)

    @cute.jit
    def reduce(self, box: Mailbox, source: Source, chunk: Int32, rank: Int32, wait: cute.Tensor) -> None:
        """Sums a chunk that this rank owns, and publishes the result unless this thread has timed out (R10)."""
        config = self.config
        own = sendable(source.chunk(chunk))
        words = cute.make_rmem_tensor(config.world_size * CHUNK_WORDS, Uint32)
        place = box.own + Int64(chunk) * CHUNK_BYTES
        addrs = tuple(place + box.row(r) for r in range(config.world_size))
        wanted = tuple(Boolean(rank != r) for r in range(config.world_size))
        collect_rows(box, words, addrs, wanted, own, chunk, 0, wait, config.spin)
        total = sum_rows([words[i] for i in range(config.world_size * CHUNK_WORDS)], config.world_size, config.dtype)
        if wait[0] >= 0:
            device.publish_words(box, box.row(rank) + Int64(chunk) * CHUNK_BYTES, sendable(total))
        for k in range_constexpr(1, config.world_size):
            addr = place + box.row(owner_of(rank, k, config.world_size))
            ptx.st_relaxed_sys_v4(addr, (Uint32(mailbox.EMPTY),) * CHUNK_WORDS)

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
        collect_rows(box, words, addrs, wanted, (Uint32(0),) * CHUNK_WORDS, chunk, WARP, wait, config.spin)
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
