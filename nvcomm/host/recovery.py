# SPDX-License-Identifier: Apache-2.0
"""Between calls: reading a mailbox back, and bringing ranks back together (docs/mailbox.md R10b)."""

from __future__ import annotations

import numpy as np

from nvcomm.group import JSON, Group
from nvcomm.host.port import Port
from nvcomm.host.words import EMPTY_WORD, clear_words, full_barrier
from nvcomm.mailbox import GENERATION_MASK, STATE_BROKEN, STATE_GENERATION, STATE_SLOT
from nvcomm.stats import Audit


def reset(port: Port, group: Group, timeout_s: float, *, rearm: bool) -> None:
    """Collective. Both barriers are needed: nobody re-arms while a peer's stores may still land, and nobody publishes
    into a mailbox that is not armed yet.

    Args:
        port: this rank's end; nobody else is inside a call on it.
        group: the ranks.
        timeout_s: bound of each wait.
        rearm: False skips draining and arming; for negative controls alone.

    Raises:
        GroupError: a rank did not come; the port must not be used before another reset succeeds.
    """
    if rearm:
        port.transport.drain(timeout_s)  # (1) own calls have ended, and own stores have landed everywhere
    full_barrier()
    generations = group.exchange("host/reset/drained", port.generation, timeout_s)  # (2)
    if rearm:
        clear_words(port.own.armed)  # (3)
    port.own.faults.fill(0)
    port.state[STATE_SLOT] = 0
    port.state[STATE_GENERATION] = above(generations)
    full_barrier()
    group.barrier("host/reset/armed", timeout_s)  # (4)
    port.state[STATE_BROKEN] = 0


def audit(port: Port, timeout_s: float) -> Audit:
    """Reads the own mailbox back, once this rank's own stores have landed; see `HostEngine.audit`."""
    port.transport.drain(timeout_s)
    dirty = np.count_nonzero(np.not_equal(port.own.armed, EMPTY_WORD))
    return Audit(port.slot, port.generation, int(dirty))


def above(generations: list[JSON]) -> int:
    """A generation above all that were used, however the 32-bit count wraps between them.

    Args:
        generations: each rank's next one; they lie far less than 2**31 apart.
    """
    first = int(generations[0])  # type: ignore[arg-type]
    half = (GENERATION_MASK + 1) // 2
    ahead = max((int(other) - first + half) % (2 * half) - half for other in generations)  # type: ignore[arg-type]
    return (first + ahead + 1) & GENERATION_MASK
