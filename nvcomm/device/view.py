# SPDX-License-Identifier: Apache-2.0
"""A rank's view of all mailboxes inside a kernel: what is where."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, Uint32

from nvcomm import mailbox
from nvcomm.handle import Handle
from nvcomm.mailbox import MailboxLayout
from nvcomm.ptx import memory as ptx

WARP = 32


@dataclass(frozen=True)
class Mailbox:
    """A rank's view of all mailboxes inside a kernel. Everything but `layout` and `multicast` is a run-time value.

    Attributes:
        layout: where things lie.
        multicast: whether to publish with the handle's `multicast_ptr`.
        handle: the rank's.
        slot: this call's slot.
        generation: this call's generation.
        outbox: with the delayed transport, where publishes go instead; else None.
    """

    layout: MailboxLayout
    multicast: bool
    handle: Handle
    slot: Uint32
    generation: Uint32
    outbox: Int64 | None

    @property
    def rank(self) -> Int32:
        """This rank."""
        return self.handle.rank

    @property
    def own(self) -> Int64:
        """This rank's mailbox."""
        return self.handle.peers[0]

    def row(self, src_rank: Int32 | int) -> Int64:
        """Bytes to row `src_rank` of this call's slot."""
        return Int64(self.slot) * self.layout.slot_bytes + Int64(src_rank) * self.layout.row_bytes

    def record(self, src_rank: Int32 | int, record: Int32) -> Int64:
        """Bytes to an escape record of this call's slot."""
        return Int64(self.layout.record_offset(Int64(self.slot), Int64(src_rank), Int64(record)))


def outbox_of(state: Int64) -> Int64:
    """Where a rank's state block says that its outbox is."""
    return Int64(ptx.ld_relaxed_gpu_u64(state + mailbox.STATE_OUTBOX * 4))
