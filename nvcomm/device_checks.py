# SPDX-License-Identifier: Apache-2.0
"""What kernels do more with NVCOMM_DEVICE_CHECKS=1: overlapping calls (R7) and calls that differ (R11) are recorded.

Both cost a memory round trip or two, so they are compiled in only when asked for.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import mailbox
from nvcomm.device import FAULT_MISMATCH, FAULT_OVERLAP, Mailbox, collect_word, publish_word, report
from nvcomm.handle import Call, Handle
from nvcomm.mailbox import EMPTY, HEADER_WORDS, RECORD_BITS, RECORD_TAG
from nvcomm.ptx import memory as ptx

_MASK = (1 << RECORD_BITS) - 1


@cute.jit
def take_busy(handle: Handle, thread: Int32, call: Call) -> None:
    """Each CTA, after its wait and before it reads the state, takes the busy word for this call (R7).

    Whoever finds another call's mark there breaks the communicator: two calls overlap. The record then has the two
    marks where a timeout's has generation and slot.
    """
    if thread == 0:
        held = ptx.atom_cas_relaxed_gpu(handle.state + mailbox.STATE_BUSY * 4, Uint32(0), call.site)
        if (held != Uint32(0)) & (held != call.site):
            broken = handle.state + mailbox.STATE_BROKEN * 4
            if ptx.atom_cas_relaxed_gpu(broken, Uint32(0), Uint32(FAULT_OVERLAP)) == 0:
                record = (Uint32(handle.rank), Uint32(handle.rank), held, call.site)
                for i in range_constexpr(len(record)):
                    ptx.st_relaxed_sys(handle.fault_record + (i + 1) * 4, record[i])
                ptx.st_release_sys(handle.fault_record, Uint32(FAULT_OVERLAP))
    cute.arch.sync_threads()


@cute.jit
def leave_busy(state: Int64, thread: Int32, num_ctas: Int32) -> None:
    """The last CTA to end gives the busy word back."""
    cute.arch.sync_threads()
    if thread == 0:
        ended = ptx.atom_add_acq_rel_gpu(state + mailbox.STATE_ENDED * 4, Uint32(1))
        if ended == Uint32(num_ctas - 1):
            ptx.st_relaxed_gpu(state + mailbox.STATE_ENDED * 4, Uint32(0))
            ptx.st_relaxed_gpu(state + mailbox.STATE_BUSY * 4, Uint32(0))


@cute.jit
def exchange_headers(box: Mailbox, call: Call, num_bytes: Int32, wait: cute.Tensor) -> None:
    """The first warp of the grid publishes this rank's header, collects all, and compares each with its own (R11).

    The words are those of `nvcomm.host.headers.encode`. Where one differs all stay in the mailbox, for the report.
    """
    lane = cute.arch.lane_idx()
    size = Uint32(num_bytes)
    fields = (
        *(call.kind & Uint32(_MASK), call.kind >> Uint32(16)),
        *(size & Uint32(_MASK), size >> Uint32(16), Uint32(0)),
        *(box.generation & Uint32(_MASK), box.generation >> Uint32(16), call.tag),
    )
    mine = Uint32(0)
    for i in range_constexpr(HEADER_WORDS):
        if lane == i:
            mine = fields[i] | Uint32(RECORD_TAG)
    differs = Boolean(False)
    if lane < HEADER_WORDS:
        offset = Int64(box.layout.header_offset(Int64(box.slot), Int64(box.rank))) + Int64(lane) * 4
        publish_word(box, offset, mine)
        for src_rank in range_constexpr(box.layout.world_size):
            offset = Int64(box.layout.header_offset(Int64(box.slot), src_rank)) + Int64(lane) * 4
            seen = collect_word(box, box.own + offset, Int32(0), src_rank, wait)
            if (seen != mine) & (seen != Uint32(EMPTY)):
                report(box, FAULT_MISMATCH, Int32(src_rank), Uint32(lane), Uint32(0))
                differs = Boolean(True)
    cute.arch.sync_warp()
    if cute.arch.vote_any_sync(differs):
        wait[0] = Int64(-1)
    elif lane < HEADER_WORDS:
        for src_rank in range_constexpr(box.layout.world_size):
            offset = Int64(box.layout.header_offset(Int64(box.slot), src_rank)) + Int64(lane) * 4
            ptx.st_relaxed_sys(box.own + offset, Uint32(EMPTY))
