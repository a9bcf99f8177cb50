# SPDX-License-Identifier: Apache-2.0
"""What a collective of the host world works on: one rank's mailboxes, transport, state and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nvcomm.host.transport import Transport
from nvcomm.host.views import MailboxViews
from nvcomm.host.words import Words
from nvcomm.mailbox import NUM_SLOTS, STATE_GENERATION, STATE_SLOT, STATE_WORDS, MailboxLayout
from nvcomm.stats import Stats


@dataclass(slots=True)
class Counts:
    """See `nvcomm.stats.Stats`."""

    longest_wait_us: list[int]
    calls: int = 0
    bytes: int = 0
    escapes: int = 0

    def freeze(self) -> Stats:
        """The counts as they are now."""
        return Stats(self.calls, self.bytes, self.escapes, tuple(self.longest_wait_us))


@dataclass(slots=True)
class Port:
    """One rank's end of the mailboxes.

    Attributes:
        rank: this rank.
        layout: of every mailbox.
        mailboxes: every rank's, indexed by rank.
        transport: brings published words there.
        timeout_s: bound of a call's waits.
        counts: what `stats()` reports.
        state: the state block, in memory of this rank alone (docs/mailbox.md R6).
    """

    rank: int
    layout: MailboxLayout
    mailboxes: tuple[MailboxViews, ...]
    transport: Transport
    timeout_s: float
    counts: Counts
    state: Words = field(default_factory=lambda: np.zeros(STATE_WORDS, np.uint32))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def own(self) -> MailboxViews:
        """This rank's mailbox."""
        return self.mailboxes[self.rank]

    @property
    def slot(self) -> int:
        """The slot of the next call."""
        return int(self.state[STATE_SLOT])

    @property
    def generation(self) -> int:
        """The generation of the next call."""
        return int(self.state[STATE_GENERATION])

    def lane(self, dst_rank: int, slot: int) -> int:
        """Names this rank's row of a slot in a mailbox, for `Transport.store`."""
        return dst_rank * NUM_SLOTS + slot
