# SPDX-License-Identifier: Apache-2.0
"""The step from one generation to the next, off the critical path (docs/mailbox.md R6).

Nobody may step slot and generation before every CTA of the grid has read them; nothing else has to be over. So a CTA
arrives as soon as its threads have used what they read, while it still waits for its peers, and the last one steps.
Whoever reads the state next does so behind `griddepcontrol.wait` or a kernel boundary (R1 i).

Assumption A4 of docs/mailbox.md: a load whose value was used before a CTA barrier has been performed, and
cannot return what is stored after an atomic behind that barrier. The atomic orders nothing by itself: an acquire or a
release here would wait for every publish of the thread to land.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from nvcomm import mailbox
from nvcomm.ptx import memory as ptx


def arrive(state: Int64, thread: Int32, num_ctas: Int32) -> Boolean:
    """All threads of a CTA call it, having used slot and generation. True for one thread of the last CTA to arrive.

    The answer takes a memory round trip: use it only after the collect.
    """
    cute.arch.sync_threads()
    first = Boolean(thread == 0)
    counted = Boolean(num_ctas != 1)
    arrived = ptx.atom_add_relaxed_gpu_if(state + mailbox.STATE_ARRIVED * 4, Uint32(1), first & counted)
    return first & Boolean(arrived == Uint32(num_ctas - 1) * Uint32(counted))


@cute.jit
def step(state: Int64, slot: Uint32, generation: Uint32, num_bytes: Int32, last: Boolean, broken: Uint32) -> None:
    """The thread that is `last` steps slot and generation; a broken communicator stays where it is (R10)."""
    if last:
        ptx.st_relaxed_gpu(state + mailbox.STATE_ARRIVED * 4, Uint32(0))
        if broken == 0:
            ptx.st_relaxed_gpu(state + mailbox.STATE_SLOT * 4, Uint32(mailbox.next_slot(slot)))
            ptx.st_relaxed_gpu(state + mailbox.STATE_GENERATION * 4, generation + Uint32(1))
            ptx.red_add_relaxed_gpu_u64(state + mailbox.STATE_BYTES * 4, Uint64(num_bytes))


@cute.jit
def release(thread: Int32, trigger: cutlass.Constexpr) -> None:
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
