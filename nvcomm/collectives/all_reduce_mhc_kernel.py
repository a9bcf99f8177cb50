# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary in one kernel: all-reduce, mHC post-mix of the residual streams, collapse, RMSNorm.

A cluster takes rows, a thread a chunk of 16 bytes of each of its rows (`MhcConfig`). It publishes its contribution to
all of its rows, then collects them one after the other, own copies included (R2), and clears them (R3):

    LL        publish x to all          | collect world_size chunks, add, round
    two-shot  send, sum, publish sums   | collect one chunk                      (all_reduce_two_shot.py, all rows flat)
    finalize  as either, with the weighted outputs of a rank's experts for x
    then      y -> new residual streams -> collapsed row -> RMSNorm -> h

Places in the mailbox are those of an all-reduce of (rows, hidden): chunk c of row i at chunk index i * chunks + c.

Order. Of what a thread reads, only `norm_weight` is read before `griddepcontrol.wait`: nothing in a decode step writes
it. A collect kernel reads residual streams, mixes and state before its wait, because the publish kernel before it
triggers after its own wait: whatever came before that kernel has ended (R1 i). Slot and generation are stepped by the
kernel that collects (`turn.py`). Nobody starves (R8): all rows are published before one is collected,
and all CTAs of all ranks are resident.

After a timeout, or on a broken communicator, y is NaN and so is what follows from it (R10).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm import device
from nvcomm.collectives import all_reduce_mhc_ahead as ahead
from nvcomm.collectives import all_reduce_mhc_math as math
from nvcomm.collectives import all_reduce_mhc_norm as norm
from nvcomm.collectives import turn
from nvcomm.collectives.all_reduce_mhc_collect import Collector
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_mhc_publish import Publisher
from nvcomm.collectives.all_reduce_mhc_rows import Boundary, Share, share_of
from nvcomm.collectives.mailbox_kernel import MailboxKernel
from nvcomm.device import WARP, Mailbox
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import arith, cluster
from nvcomm.ptx import memory as ptx


class AllReduceMhcKernel(MailboxKernel):
    """The kernel of one `MhcConfig`."""

    config: MhcConfig
    work = Boundary

    def __init__(self, config: MhcConfig) -> None:
        super().__init__(config)
        self.ctas = config.cluster
        if config.collects:  # a publisher does without, and so finds room beside what waits for it (R8)
            self.cluster = config.cluster
            self.shared_bytes = norm.shared_bytes(config)
        self.publisher = Publisher(config)
        self.collector = Collector(config)

    @cute.kernel
    def kernel(self, work: Boundary, handle: Handle, call: Call) -> None:
        config, rows = self.config, work.rows
        at = turn.place(config)
        share = share_of(config, at)
        smem = cluster.shared_base()
        if const_expr(config.collects):
            norm.start(config, smem, at.thread)
            weight = ptx.ld_weak_v4_if(
                work.norm_weight + Int64(share.chunk) * CHUNK_BYTES, share.inside & (work.pre != 0)
            )
        num_bytes = rows * config.shape.row_bytes
        if const_expr(config.publishes):
            # a publish kernel triggers after its wait (R1 i)
            turn.wait_for_previous(config, config.pdl == "early" or not config.collects, handle, call, at.thread)
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)
        box = turn.open_box(config, handle, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        wait = device.new_wait()
        source = self.publisher.source(work)
        if const_expr(config.collects):
            old = cute.make_rmem_tensor(config.shape.num_streams * CHUNK_WORDS, Uint32)
            factor = ahead.load_row(config, work, share, share.first, Boolean(share.first < rows), old)
        if const_expr(config.publishes):
            self.publisher.publish(box, at, share, source, rows, call, live, wait)
        if const_expr(config.collects):
            last = turn.arrive(box, at)
            if const_expr(config.device_checks and not config.publishes and config.pdl != "off"):
                cute.arch.griddepcontrol_wait()  # R1 (i): before the header is published
            if const_expr(not config.two_shot):  # whose owners compare before they wait for contributions
                turn.compare(config, box, call, num_bytes, Boolean(at.index < WARP) & live, wait)
            words = cute.make_rmem_tensor(self.collector.num_words, Uint32)
            self.collector.look(box, words, share.first * config.shape.chunks + share.chunk, share.inside & live)
            row = share.first
            index = Uint32(0)
            norm.started(config)
            while row < rows:
                factor = self.boundary(box, work, share, row, words, old, factor, weight, smem, index, live, wait)
                index = index + Uint32(1)
                row += share.step
            turn.end(config, box, at, rows * config.shape.row_bytes, last, broken)

    @cute.jit
    def boundary(
        self,
        box: Mailbox,
        work: Boundary,
        share: Share,
        row: Int32,
        words: cute.Tensor,
        old: cute.Tensor,
        factor: Uint32,
        weight: tuple[Uint32, Uint32, Uint32, Uint32],
        smem: Uint32,
        index: Uint32,
        live: Boolean,
        wait: cute.Tensor,
    ) -> Uint32:
        """A row. What the rows after it need is on its way before the cluster waits for itself.

        Args:
            box, work, share: the call.
            row: the row.
            words: this thread's words of the row in the mailbox as last seen; afterwards those of the next row.
            old: this thread's chunks of the row's residual streams; afterwards those of the next row.
            factor: a factor of the row, see `all_reduce_mhc_ahead.load_row`.
            weight: this thread's chunk of `norm_weight`.
            smem, index: see `all_reduce_mhc_norm.row_sum`.
            live: whether the communicator is not broken.
            wait: see `device.collect_chunk`.

        Returns:
            A factor of the next row.
        """
        config, shape = self.config, self.config.shape
        num_streams, inside = shape.num_streams, share.inside
        at = Int64(share.chunk) * CHUNK_BYTES
        there = Boolean(row + share.step < work.rows)
        following = cute.make_rmem_tensor(num_streams * CHUNK_WORDS, Uint32)
        next_factor = ahead.load_row(config, work, share, row + share.step, there, following)
        y = self.collector.collect(box, words, row * shape.chunks + share.chunk, inside, live, wait)
        post_row = ahead.factors(factor, 0, num_streams)
        comb_row = [ahead.factors(factor, num_streams * (s + 1), num_streams) for s in range(num_streams)]
        streams = math.post_mix(y, ahead.streams_of(config, old), post_row, comb_row)
        if inside:
            for s in range_constexpr(num_streams):
                ptx.st_weak_v4(work.new_residual + Int64(row * num_streams + s) * shape.row_bytes + at, streams[s])
        pre_row = ahead.factors(factor, num_streams * (num_streams + 1), num_streams)
        self.collector.look(box, words, (row + share.step) * shape.chunks + share.chunk, inside & live & there)
        for i in range_constexpr(num_streams * CHUNK_WORDS):
            old[i] = following[i]
        if work.pre != 0:
            values = math.collapse(streams, pre_row)
            total = norm.row_sum(config, smem, index, share.cta, share.thread, math.sum_of_squares(values))
            mean = arith.mul_rn(total, Float32(1.0 / shape.hidden))
            scale = arith.rsqrt(arith.add_rn(mean, work.eps))
            if inside:
                ptx.st_weak_v4(work.h + Int64(row) * shape.row_bytes + at, math.scale(values, scale, weight))
        return next_factor
