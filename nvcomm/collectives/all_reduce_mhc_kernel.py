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
kernel that collects, as in `all_reduce_turn.py`. Nobody starves (R8): all rows are published before one is collected,
and all CTAs of all ranks are resident.

After a timeout, or on a broken communicator, y is NaN and so is what follows from it (R10).
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm import device
from nvcomm.collectives import all_reduce_mhc_ahead as ahead
from nvcomm.collectives import all_reduce_mhc_math as math
from nvcomm.collectives import all_reduce_mhc_norm as norm
from nvcomm.collectives import all_reduce_turn as turn
from nvcomm.collectives.all_reduce_call import begin, compare, end, open_box
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.all_reduce_rows import poll_rows
from nvcomm.collectives.all_reduce_source import ExpertSource, Source, TensorSource
from nvcomm.collectives.all_reduce_tree import sendable, sum_rows
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.device import WARP, Mailbox
from nvcomm.device_checks import CallWords
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, EMPTY
from nvcomm.ptx import arith, cluster
from nvcomm.ptx import memory as ptx


class AllReduceMhcKernel:
    """The kernel of one `MhcConfig`."""

    def __init__(self, config: MhcConfig) -> None:
        self.config = config
        self.publishes = config.part != "collect"
        self.collects = config.part != "publish"
        flat = ReduceConfig(
            config.layout, "bf16", CHUNK_BYTES, config.multicast, config.pdl, spin=config.spin, delayed=config.delayed
        )
        self.two_shot = AllReduceTwoShotKernel(flat)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        expert_weights: Int64,
        expert_indices: Int64,
        shared: Int64,
        residual: Int64,
        post: Int64,
        comb: Int64,
        pre: Int64,
        norm_weight: Int64,
        new_residual: Int64,
        h: Int64,
        eps: Float32,
        rows: Int32,
        peers: list[Int64],
        multicast_ptr: Int64,
        state: Int64,
        fault_record: Int64,
        timeout_ns: Int64,
        rank: Int32,
        site: Uint32,
        kind: Uint32,
        tag: Uint32,
        clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Launches the kernel.

        Args:
            x: (rows, hidden) bf16, or for "finalize" the experts' outputs (expert rows, hidden) bf16.
            expert_weights, expert_indices, shared: see `ExpertSource`; for "finalize" only.
            residual: (rows, hc, hidden) bf16.
            post, comb: (rows, hc) and (rows, hc source, hc target) fp32.
            pre: (rows, hc) fp32; 0: no collapse, and h is not written.
            norm_weight: (hidden,) bf16.
            new_residual, h: results, (rows, hc, hidden) and (rows, hidden) bf16.
            eps: added to the mean square.
            rows: of this call, not 0.
            peers, multicast_ptr, state, fault_record, timeout_ns, rank: see `nvcomm.device.Mailbox`.
            site, kind, tag: see `nvcomm.device_checks.CallWords`; not read without device checks.
            clusters: clusters of the grid, the same on every rank.
            stream: where it runs.
        """
        config = self.config
        self.kernel(
            x, expert_weights, expert_indices, shared, residual, post, comb, pre, norm_weight, new_residual, h, eps,
            rows, peers, multicast_ptr, state, fault_record, timeout_ns, rank, site, kind, tag,
        ).launch(
            grid=(clusters * config.cluster, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
            smem=norm.shared_bytes(config),
            stream=stream,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=-1,  # the driver's default; left out, the compiler asks the driver for a GPU
            use_pdl=config.pdl != "off",
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        expert_weights: Int64,
        expert_indices: Int64,
        shared: Int64,
        residual: Int64,
        post: Int64,
        comb: Int64,
        pre: Int64,
        norm_weight: Int64,
        new_residual: Int64,
        h: Int64,
        eps: Float32,
        rows: Int32,
        peers: list[Int64],
        multicast_ptr: Int64,
        state: Int64,
        fault_record: Int64,
        timeout_ns: Int64,
        rank: Int32,
        site: Uint32,
        kind: Uint32,
        tag: Uint32,
    ) -> None:
        config = self.config
        shape = config.shape
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        cta = block % config.cluster
        chunk = cta * config.threads + thread  # within a row
        inside = Boolean(chunk < shape.chunks)
        step = num_ctas // config.cluster
        first = block // config.cluster
        if const_expr(self.collects):
            norm.start(config)
            weight = ptx.ld_weak_v4_if(norm_weight + Int64(chunk) * CHUNK_BYTES, inside & (pre != 0))
        call = CallWords(site, kind, rows * shape.row_bytes, tag)
        if const_expr(self.publishes):
            # a publish kernel triggers after its wait (R1 i)
            begin(config, config.pdl == "early" or not self.collects, state, fault_record, rank, thread, call)
        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(state)
        box = open_box(config, rank, peers, multicast_ptr, state, fault_record, timeout_ns, slot, generation)
        live = Boolean(broken == 0)  # a broken communicator publishes nothing (R10)
        wait = cute.make_rmem_tensor(1, Int64)
        wait[0] = Int64(0)
        if const_expr(config.part == "finalize"):
            source: Source = ExpertSource(x, expert_weights, expert_indices, shared, shape.chunks, shape.top_k)
        else:
            source = TensorSource(x, rows * shape.row_bytes, CHUNK_BYTES)
        smem = cluster.shared_base()
        if const_expr(self.collects):
            old = cute.make_rmem_tensor(shape.num_streams * CHUNK_WORDS, Uint32)
            ahead.load_streams(config, old, residual, first, chunk, inside & (first < rows))
            factor = ahead.load_factor(config, post, comb, pre, first, thread % WARP, Boolean(first < rows))
        if const_expr(self.publishes):
            if const_expr(config.two_shot):
                self.publish_sums(box, source, rows * shape.chunks, block, thread, num_ctas, live, wait)
            else:
                self.publish_rows(box, source, chunk, inside, first, step, rows, live)
        if const_expr(self.collects):
            last = turn.arrive(state, thread, num_ctas)
            if const_expr(config.device_checks and not self.publishes and config.pdl != "off"):
                cute.arch.griddepcontrol_wait()  # R1 (i): before the header is published
            compare(config, box, call, Boolean(block * config.threads + thread < WARP), live, wait)
            words = cute.make_rmem_tensor(self.words_of_row, Uint32)
            self.look(box, words, first * shape.chunks + chunk, inside & live)
            row = first
            odd = Uint32(0)
            norm.started(config)
            while row < rows:
                factor = self.boundary(
                    box, residual, post, comb, pre, new_residual, h, eps, weight, words, old, factor, row, step, rows,
                    chunk, inside, cta, thread, smem, odd, live, wait,
                )  # fmt: skip
                odd = odd ^ Uint32(1)
                row += step
            end(config, state, slot, generation, rows * shape.row_bytes, last, broken, thread, num_ctas)

    @cute.jit
    def publish_rows(
        self,
        box: Mailbox,
        source: Source,
        chunk: Int32,
        inside: Boolean,
        first: Int32,
        step: Int32,
        rows: Int32,
        live: Boolean,
    ) -> None:
        """LL: publishes this thread's chunk of each of its rows."""
        row = first
        while row < rows:
            place = row * self.config.shape.chunks + chunk
            if live & inside:
                device.publish_words(box, box.row(box.rank) + Int64(place) * CHUNK_BYTES, sendable(source.chunk(place)))
            row += step

    @cute.jit
    def publish_sums(
        self,
        box: Mailbox,
        source: Source,
        num_chunks: Int32,
        block: Int32,
        thread: Int32,
        num_ctas: Int32,
        live: Boolean,
        wait: cute.Tensor,
    ) -> None:
        """Two-shot: sends all chunks that others own, then sums and publishes those that this rank owns."""
        warps = self.config.threads // WARP
        words = cute.make_rmem_tensor(max(self.config.layout.world_size - 1, 1) * CHUNK_WORDS, Uint32)
        step = num_ctas * warps * self.two_shot.span
        first = (block * warps + thread // WARP) * self.two_shot.span + thread % WARP
        chunk = first
        if const_expr(self.config.part == "finalize"):
            while chunk < num_chunks:
                for k in range_constexpr(1, self.config.layout.world_size):  # one after the other: registers
                    self.two_shot.load(words, source, chunk, num_chunks, box.rank, [k])
                    self.two_shot.send(box, words, chunk, num_chunks, box.rank, live, k, k + 1)
                chunk += step
        else:
            self.two_shot.load(words, source, chunk, num_chunks, box.rank)
            while chunk < num_chunks:
                self.two_shot.send(box, words, chunk, num_chunks, box.rank, live, 1, self.config.layout.world_size)
                chunk += step
                if chunk < num_chunks:
                    self.two_shot.load(words, source, chunk, num_chunks, box.rank)
        chunk = first
        while chunk < num_chunks:
            owned = chunk + box.rank * WARP
            if live & (owned < num_chunks):
                self.two_shot.reduce(box, source, owned, box.rank, wait)
            chunk += step

    @cute.jit
    def boundary(
        self,
        box: Mailbox,
        residual: Int64,
        post: Int64,
        comb: Int64,
        pre: Int64,
        new_residual: Int64,
        h: Int64,
        eps: Float32,
        weight: tuple[Uint32, Uint32, Uint32, Uint32],
        words: cute.Tensor,
        old: cute.Tensor,
        factor: Uint32,
        row: Int32,
        step: Int32,
        rows: Int32,
        chunk: Int32,
        inside: Boolean,
        cta: Int32,
        thread: Int32,
        smem: Uint32,
        odd: Uint32,
        live: Boolean,
        wait: cute.Tensor,
    ) -> Uint32:
        """A row. What the rows after it need is on its way before the cluster waits for itself.

        Args:
            words: this thread's words of the row in the mailbox as last seen; afterwards those of the next row.
            old: this thread's chunks of the row's residual streams; afterwards those of the next row.
            factor: a factor of the row, see `all_reduce_mhc_ahead.load_factor`.
            odd: 0 and 1 in turn, row by row.

        Returns:
            A factor of the next row.
        """
        config, shape = self.config, self.config.shape
        num_streams = shape.num_streams
        at = Int64(chunk) * CHUNK_BYTES
        there = Boolean(row + step < rows)
        following = cute.make_rmem_tensor(num_streams * CHUNK_WORDS, Uint32)
        ahead.load_streams(config, following, residual, row + step, chunk, inside & there)
        next_factor = ahead.load_factor(config, post, comb, pre, row + step, thread % WARP, there)
        y = self.collect(box, words, row * shape.chunks + chunk, inside, live, wait)
        post_row = ahead.factors(factor, 0, num_streams)
        comb_row = [ahead.factors(factor, num_streams * (s + 1), num_streams) for s in range(num_streams)]
        streams = math.post_mix(y, ahead.streams_of(config, old), post_row, comb_row)
        if inside:
            for s in range_constexpr(num_streams):
                ptx.st_weak_v4(new_residual + Int64(row * num_streams + s) * shape.row_bytes + at, streams[s])
        pre_row = ahead.factors(factor, num_streams * (num_streams + 1), num_streams)
        self.look(box, words, (row + step) * shape.chunks + chunk, inside & live & there)
        for i in range_constexpr(num_streams * CHUNK_WORDS):
            old[i] = following[i]
        if pre != 0:
            values = math.collapse(streams, pre_row)
            total = norm.row_sum(config, smem, odd, cta, thread, math.sum_of_squares(values))
            mean = arith.mul_rn(total, Float32(1.0 / shape.hidden))
            scale = arith.rsqrt(arith.add_rn(mean, eps))
            if inside:
                ptx.st_weak_v4(h + Int64(row) * shape.row_bytes + at, math.scale(values, scale, weight))
        return next_factor

    def look(self, box: Mailbox, words: cute.Tensor, place: Int32, there: Boolean) -> None:
        """Reads a chunk's words in the mailbox as they are now; 0 where nothing is `there` to be read."""
        for r, addr in enumerate(self.addrs(box, place)):
            for i, word in enumerate(ptx.ld_relaxed_sys_v4_if(addr, there, (Uint32(0),) * CHUNK_WORDS)):
                words[r * CHUNK_WORDS + i] = word

    @cute.jit
    def collect(
        self, box: Mailbox, words: cute.Tensor, place: Int32, inside: Boolean, live: Boolean, wait: cute.Tensor
    ) -> list[Uint32]:
        """Waits for the words of a chunk, clears them (R3) and returns the reduced chunk."""
        config = self.config
        addrs = self.addrs(box, place)
        if const_expr(config.spin):
            first_rank = self.owner(place) if const_expr(config.two_shot) else 0
            poll_rows(box, words, addrs, place, 0, first_rank, wait)
        if const_expr(not self.publishes and config.pdl != "off"):
            cute.arch.griddepcontrol_wait()  # R1 (i): before the first store of any kind
        if inside & live:
            for addr in addrs:
                ptx.st_relaxed_sys_v4(addr, (Uint32(EMPTY),) * CHUNK_WORDS)
        lost = Uint32(live) - Uint32(1)  # all ones on a broken communicator: NaN (R10)
        held = [words[i] | lost for i in range(self.words_of_row)]
        return held if const_expr(config.two_shot) else sum_rows(held, config.layout.world_size, "bf16")

    @property
    def words_of_row(self) -> int:
        """Words of the mailbox that make a chunk: a result's, or every rank's contribution."""
        return CHUNK_WORDS * (1 if self.config.two_shot else self.config.layout.world_size)

    def addrs(self, box: Mailbox, place: Int32) -> tuple[Int64, ...]:
        """Where those words lie."""
        at = box.own + Int64(place) * CHUNK_BYTES
        if self.config.two_shot:
            return (at + box.row(self.owner(place)),)
        return tuple(at + box.row(r) for r in range(self.config.layout.world_size))

    def owner(self, place: Int32) -> Int32:
        """The rank that owns a chunk (two-shot)."""
        return (place // WARP) % self.config.layout.world_size
