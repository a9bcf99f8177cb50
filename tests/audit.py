# SPDX-License-Identifier: Apache-2.0
"""The audit after every test: each mailbox is read back before its world is closed, or the test fails.

Every word and record EMPTY, every rank at the same generation and slot (docs/mailbox.md R3). Left out are worlds with a
rank that reported a fault, whose mailboxes hold what was not collected until `reset()`, and protocols that are wrong on
purpose.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any


def assert_clean(ranks: Sequence[Any]) -> None:
    """The audits of all ranks, engines or communicators, at once."""
    audits = [rank.audit() for rank in ranks]
    assert [audit.dirty_words for audit in audits] == [0] * len(audits), f"words left in the mailboxes: {audits}"
    assert len({(audit.slot, audit.generation) for audit in audits}) <= 1, f"ranks at different places: {audits}"


def ended_well(engines: Sequence[Any]) -> bool:
    """Whether a mailbox of these engines has to be clean now."""
    options = [getattr(engine, "options", None) for engine in engines]
    right = all(option is None or option.protocol == "mailbox" for option in options)
    return right and not any(getattr(engine, "_mutations", ()) or engine.fault() for engine in engines)


def audited(close: Callable[[Any], None]) -> Callable[[Any], None]:
    """`VirtualWorld.close` with the audit before it; none where the test is failing already."""

    @functools.wraps(close)
    def audit_and_close(world: Any) -> None:
        try:
            if sys.exc_info()[0] is None and all(comm._engine is not None for comm in world):
                engines = [comm.engine for comm in world]
                if ended_well(engines):
                    assert_clean(engines)
        finally:
            close(world)

    return audit_and_close
