# SPDX-License-Identifier: Apache-2.0
"""The agent that delivers an outbox: a kernel of its own, on a stream of its own, beside the collectives.

It serves one launch of calls: `serving` forks it off the current stream, marks the end of the calls behind them, and
joins it once everything is delivered. So it can be captured, and the device can still be waited for. One CTA a rank, of
half of a multiprocessor: `nvcomm.residency` counts it (docs/mailbox.md R8).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit, outbox
from nvcomm.outbox import AGENT_THREADS, ENTRIES, ENTRY_BYTES, ENTRY_TURN, RING
from nvcomm.ptx import memory as ptx
from nvcomm.streams import OwnedStream


class DeliverKernel:
    """One CTA; thread t serves entries t, t + AGENT_THREADS, ... of the ring, each after its own delay."""

    @cute.jit
    def __call__(self, box: Int64, seed: Uint32, stream: CUstream) -> None:
        # two fit a multiprocessor, so that one finds room beside calls (R8)
        self.kernel(box, seed).launch(
            grid=(1, 1, 1),
            block=(AGENT_THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=-1,
        )

    @cute.kernel
    def kernel(self, box: Int64, seed: Uint32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        served = ptx.ld_relaxed_gpu(box + outbox.DELIVERED)
        mine = ptx.ld_relaxed_gpu(box + outbox.NEXT + Int64(thread) * 4) + Uint32(thread)
        serving = Boolean(True)
        while serving:
            entry = box + ENTRIES + Int64(mine % Uint32(RING)) * ENTRY_BYTES
            turn = (mine // Uint32(RING)) * Uint32(2) + Uint32(1)
            # Looked at before the entry: once the end is marked, an entry that is not full will not become so.
            going = ptx.ld_acquire_gpu(box + outbox.ENDED) == served
            if ptx.ld_acquire_gpu(entry + ENTRY_TURN) == turn:
                noise = (mine * Uint32(0x9E3779B1)) ^ seed
                noise = (noise ^ (noise >> Uint32(15))) * Uint32(0x85EBCA77)
                noise = (noise ^ (noise >> Uint32(13))) * Uint32(0xC2B2AE3D)
                outbox.deliver(entry, turn, noise ^ (noise >> Uint32(16)))
                mine = mine + Uint32(AGENT_THREADS)
            else:
                serving = Boolean(going)
        ptx.st_relaxed_gpu(box + outbox.NEXT + Int64(thread) * 4, mine - Uint32(thread))
        cute.arch.sync_threads()
        if thread == 0:
            ptx.st_relaxed_gpu(box + outbox.DELIVERED, served + Uint32(1))


class EndKernel:
    """Behind the calls of a launch: tells the agent that nothing more will be posted."""

    @cute.jit
    def __call__(self, box: Int64, stream: CUstream) -> None:
        self.kernel(box).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, box: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            ptx.st_release_gpu(box + outbox.ENDED, ptx.ld_relaxed_gpu(box + outbox.ENDED) + Uint32(1))


class Delivery:
    """A rank's outbox and its agent.

    Args:
        device: the rank's GPU.
        seed: of the delays.

    Attributes:
        active: whether calls are inside `serving`.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._outbox = torch.zeros(outbox.OUTBOX_BYTES, dtype=torch.uint8, device=device)
        self._seed = seed & 0xFFFFFFFF
        self._device = device
        self._deliver = jit.compile_kernel(DeliverKernel(), Int64(0), Uint32(0), make_fake_stream(), key=())
        self._end = jit.compile_kernel(EndKernel(), Int64(0), make_fake_stream(), key=())
        for kernel in (self._deliver, self._end):
            jit.preload(kernel)
        self._owned = OwnedStream(device)  # last: what fails before it leaves nothing behind
        self.active = False

    @property
    def ptr(self) -> int:
        """The outbox's address, for STATE_OUTBOX."""
        return self._outbox.data_ptr()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Delivers what calls inside the block post on the current stream; nested blocks are one."""
        if self.active:
            yield
            return
        current, agent = torch.cuda.current_stream(self._device), self._owned.stream
        agent.wait_stream(current)
        self._deliver(self.ptr, self._seed, agent.cuda_stream)
        self.active = True
        try:
            yield
        finally:  # also when a call raised: an agent without an end would run for ever
            self.active = False
            self._end(self.ptr, current.cuda_stream)
            current.wait_stream(agent)

    def close(self) -> None:
        """Destroys the agent's stream; nothing may be under way."""
        self._owned.close()
