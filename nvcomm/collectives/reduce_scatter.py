# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: every rank receives the sum of its own part.

The rows of the input are split over the ranks as `torch.tensor_split` does: the first `rows % world_size` ranks own one
row more. A thread sends chunk i of part d into row `rank` of rank d's mailbox, at place i, for every d, its own rank
included; then collects chunk i of its own part from every row (R2), clears it (R3), adds and rounds as all-reduce does
(R13):

    rank d's mailbox      row r   [ chunk 0 of part d, from rank r | chunk 1 | ... ]

A rank without rows is sent one chunk of zeros by everybody, which it collects and clears like any chunk: it waits for
everybody too (R12). Places start at 0 in every part; only rank r ever writes row r, so nothing is packed by size (R3).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm import device
from nvcomm.collectives import turn
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_rows import owner_of
from nvcomm.collectives.all_reduce_tree import sendable, sum_rows
from nvcomm.collectives.mailbox_kernel import MailboxKernel
from nvcomm.collectives.tensors import load_chunk, store_chunk
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import memory as ptx


class Rows(NamedTuple):
    """The work of a reduce-scatter.

    Attributes:
        inp, out: addresses of the tensors.
        rows: of the input, not 0.
        row_bytes: bytes of a row, not 0.
    """

    inp: Int64
    out: Int64
    rows: Int32
    row_bytes: Int32


class ReduceScatterKernel(MailboxKernel):
    """The reduce-scatter of one `ReduceConfig`."""

    config: ReduceConfig
    work = Rows

    @cute.kernel
    def kernel(self, work: Rows, handle: Handle, call: Call) -> None:
        config = self.config
        inp, out, rows, row_bytes = work
        rank = handle.rank
        at = turn.place(config)
        contributed = rows * row_bytes
        turn.wait_for_previous(config, config.pdl == "early", handle, call, at.thread)
        step, first = at.stride, at.index
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)
        box = turn.open_box(config, handle, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        chunk = first
        while chunk < num_chunks_of(part_bytes(0, rows, row_bytes, config.world_size)):  # the largest part
            if live:
                self.send(box, inp, chunk, rows, row_bytes, rank)
            chunk += step
        last = turn.arrive(box, at)
        wait = device.new_wait()
        turn.compare(config, box, call, contributed, Boolean(first < WARP) & live, wait)
        num_bytes = part_bytes(rank, rows, row_bytes, config.world_size)
        chunk = first
        while chunk < num_chunks_of(num_bytes):
            if live:
                self.collect(box, out, chunk, num_bytes, wait)
            elif num_bytes > 0:
                store_chunk(out, chunk, num_bytes, config.access_bytes, [Uint32(device.FILL)] * CHUNK_WORDS)
            chunk += step
        turn.end(config, box, at, rows * row_bytes, last, broken)

    @cute.jit
    def send(self, box: Mailbox, inp: Int64, chunk: Int32, rows: Int32, row_bytes: Int32, rank: Int32) -> None:
        """Sends a chunk of every part to its owner, all loads in flight together; zeros where a part is empty (R12)."""
        config = self.config
        words = cute.make_rmem_tensor(config.world_size * CHUNK_WORDS, Uint32)
        words.fill(Uint32(0))
        for k in range_constexpr(config.world_size):
            owner = owner_of(rank, k, config.world_size)
            num_bytes = part_bytes(owner, rows, row_bytes, config.world_size)
            if chunk * CHUNK_BYTES < num_bytes:
                part = inp + Int64(part_start(owner, rows, config.world_size)) * Int64(row_bytes)
                loaded = load_chunk(part, chunk, num_bytes, config.access_bytes)
                for i in range_constexpr(CHUNK_WORDS):
                    words[k * CHUNK_WORDS + i] = loaded[i]
        for k in range_constexpr(config.world_size):
            owner = owner_of(rank, k, config.world_size)
            if chunk < num_chunks_of(part_bytes(owner, rows, row_bytes, config.world_size)):
                sent = sendable([words[k * CHUNK_WORDS + i] for i in range(CHUNK_WORDS)])
                device.send_words(box, k, box.row(rank) + Int64(chunk) * CHUNK_BYTES, sent)

    @cute.jit
    def collect(self, box: Mailbox, out: Int64, chunk: Int32, num_bytes: Int32, wait: cute.Tensor) -> None:
        """Collects a chunk of every row, clears it and writes the sum out, if there is anything to write."""
        config = self.config
        num_words = config.world_size * CHUNK_WORDS
        words = cute.make_rmem_tensor(num_words, Uint32)
        addr = box.own + box.row(0) + Int64(chunk) * CHUNK_BYTES
        if const_expr(config.spin):
            device.collect_chunk(box, words, addr, chunk, 0, config.world_size, wait)
        else:
            device.load_rows(words, addr, config.layout.row_bytes, config.world_size)
        device.clear_chunk(box, addr, config.world_size)
        if num_bytes > 0:
            total = sum_rows([words[i] for i in range(num_words)], config.world_size, config.dtype)
            store_chunk(out, chunk, num_bytes, config.access_bytes, total)


def part_bytes(rank: Int32 | int, rows: Int32, row_bytes: Int32, world_size: int) -> Int32:
    """Bytes of a rank's part."""
    return (rows // world_size + Int32(rank < rows % world_size)) * row_bytes


def part_start(rank: Int32, rows: Int32, world_size: int) -> Int32:
    """Rows before a rank's part."""
    return rank * (rows // world_size) + cutlass.min(rank, rows % world_size)


def num_chunks_of(num_bytes: Int32) -> Int32:
    """Chunks that carry a part; one where it is empty (R12)."""
    return cutlass.max((num_bytes + (CHUNK_BYTES - 1)) // CHUNK_BYTES, 1)
