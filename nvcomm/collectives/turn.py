# SPDX-License-Identifier: Apache-2.0
"""A call's turn at the mailbox: what every kernel does before it publishes and after it collected.

    begin           where this thread stands; wait for the kernel before this one (R1 i, iii, R7)
    open_box        the mailboxes of this call's slot (R6)
    arrive          slot and generation have been used
    compare         with device checks: do the ranks call the same? (R11)
    end             step slot and generation (R6), then let the next kernel go (R1 ii)

Nobody may step slot and generation before every CTA of the grid has read them; nothing else has to be over. So a CTA
arrives as soon as its threads have used what they read, while it still waits for its peers, and the last one steps.
Whoever reads the state next does so behind `griddepcontrol.wait` or a kernel boundary (R1 i).

Assumption A4 of docs/mailbox.md: a load whose value was used before a CTA barrier has been performed, and
cannot return what is stored after an atomic behind that barrier. The atomic orders nothing by itself: an acquire or a
release here would wait for every publish of the thread to land.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from nvcomm import device, mailbox
from nvcomm.collectives.mailbox_kernel import KernelConfig
from nvcomm.device import Mailbox
from nvcomm.device_checks import exchange_headers, leave_busy, take_busy
from nvcomm.handle import Call, Handle
from nvcomm.ptx import memory as ptx


@dataclass(frozen=True)
class Place:
    """Where a thread stands in its grid."""

    thread: Int32
    cta: Int32
    num_ctas: Int32
    cta_threads: int

    @property
    def index(self) -> Int32:
        """Index of the thread in the grid."""
        return self.cta * self.cta_threads + self.thread

    @property
    def stride(self) -> Int32:
        """Threads of the grid."""
        return self.num_ctas * self.cta_threads


def place(config: KernelConfig) -> Place:
    """This thread's place."""
    return Place(cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0], config.threads)


def begin(config: KernelConfig, handle: Handle, call: Call) -> Place:
    """Waits for the kernel before this one, and triggers the next if the caller wants that early (R1 i, iii)."""
    at = place(config)
    wait_for_previous(config, config.pdl == "early", handle, call, at.thread)
    return at


@cute.jit
def wait_for_previous(
    config: cutlass.Constexpr, trigger: cutlass.Constexpr, handle: Handle, call: Call, thread: Int32
) -> None:
    """Waits for the kernel before this one, and triggers the next if `trigger` says so (R1 i, iii)."""
    if const_expr(config.pdl != "off"):
        cute.arch.griddepcontrol_wait()  # R1 (i)
        if const_expr(trigger):
            cute.arch.griddepcontrol_launch_dependents()  # R1 (iii)
    if const_expr(config.device_checks):
        take_busy(handle, thread, call)


def open_box(config: KernelConfig, handle: Handle, slot: Uint32, generation: Uint32) -> Mailbox:
    """The mailboxes as this rank sees them in this call."""
    outbox = device.outbox_of(handle.state) if config.delayed else None
    return Mailbox(config.layout, config.multicast, handle, slot, generation, outbox)


def arrive(box: Mailbox, at: Place) -> Boolean:
    """All threads of a CTA call it, having used slot and generation, or at least begun to load them (A4).

    True for one thread of the last CTA to arrive. The answer takes a memory round trip: use it only after the collect.
    """
    cute.arch.sync_threads()
    first = Boolean(at.thread == 0)
    counted = Boolean(at.num_ctas != 1)
    arrived = ptx.atom_add_relaxed_gpu_if(box.handle.state + mailbox.STATE_ARRIVED * 4, Uint32(1), first & counted)
    return first & Boolean(arrived == Uint32(at.num_ctas - 1) * Uint32(counted))


@cute.jit
def compare(
    config: cutlass.Constexpr, box: Mailbox, call: Call, num_bytes: Int32, chosen: Boolean, wait: cute.Tensor
) -> None:
    """With device checks, the warp that is `chosen` compares what the ranks call (R11)."""
    if const_expr(config.device_checks):  # noqa: SIM102 - this one is decided while the kernel is traced
        if chosen:
            exchange_headers(box, call, num_bytes, wait)


@cute.jit
def end(config: cutlass.Constexpr, box: Mailbox, at: Place, num_bytes: Int32, last: Boolean, broken: Uint32) -> None:
    """Steps to the next generation, and lets the next kernel go (R1 ii) unless that has been done early."""
    _step(box, num_bytes, last, broken)
    if const_expr(config.device_checks):
        leave_busy(box.handle.state, at.thread, at.num_ctas)
    if const_expr(config.pdl != "early"):
        _release(at.thread, config.pdl == "safe")


@cute.jit
def _step(box: Mailbox, num_bytes: Int32, last: Boolean, broken: Uint32) -> None:
    """The thread that is `last` steps slot and generation; a broken communicator stays where it is (R10)."""
    state = box.handle.state
    if last:
        ptx.st_relaxed_gpu(state + mailbox.STATE_ARRIVED * 4, Uint32(0))
        if broken == 0:
            ptx.st_relaxed_gpu(state + mailbox.STATE_SLOT * 4, Uint32(mailbox.next_slot(box.slot)))
            ptx.st_relaxed_gpu(state + mailbox.STATE_GENERATION * 4, box.generation + Uint32(1))
            ptx.red_add_relaxed_gpu_u64(state + mailbox.STATE_BYTES * 4, Uint64(num_bytes))


@cute.jit
def _release(thread: Int32, trigger: cutlass.Constexpr) -> None:
    """The CTA's last act: a fence behind all of its stores, and then perhaps the trigger for the next kernel (R1 ii).

    One thread's fence covers the CTA's stores, which the barrier put before it (PTX 8.10: causality order is
    transitive). Scope gpu: outputs, clears and state lie in this GPU's memory, and what was published elsewhere is
    waited for by whoever collects it.
    """
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.fence_acq_rel_gpu()
        if const_expr(trigger):
            cute.arch.griddepcontrol_launch_dependents()
