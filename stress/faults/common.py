# SPDX-License-Identifier: Apache-2.0
"""What the lists of faults of all worlds have in common: how faults end, and the lines that every world has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from nvcomm.mailbox import GENERATION_MASK
from stress.faults.table import (
    AS_BEFORE,
    CALLS_BEFORE,
    ODD_RANK,
    RANKS,
    RESET_OR_NOT,
    SUCCESS,
    UNDEFINED,
    Ending,
    Fault,
)

Scene = TypeVar("Scene")  # what a world's work is called with

WORDS = 64  # that a rank gathers
EVERY_RANK = tuple(range(RANKS))
FIRST = (CALLS_BEFORE, CALLS_BEFORE % 2)  # generation and slot of the first call that a fault concerns
TIMED_OUT = Ending("PeerTimeoutError", ODD_RANK, (FIRST,))
MISMATCH = Ending("CollectiveMismatchError")
GOES_ON = Ending(SUCCESS, then=AS_BEFORE)
ANYTHING = Ending(UNDEFINED, then=RESET_OR_NOT)


def absences(
    never_arrives: Callable[[Scene], None],
    one_call_fewer: Callable[[Scene], None],
    raises_between_calls: Callable[[Scene], None],
) -> tuple[Fault[Callable[[Scene], None]], ...]:
    """The odd rank does not come: from the start, to the third of three calls, or as its program raised."""
    return (
        Fault("never arrives", TIMED_OUT, never_arrives),
        Fault("makes one call fewer", replace(TIMED_OUT, places=((CALLS_BEFORE + 2, 1),)), one_call_fewer),
        Fault("raises between two calls", TIMED_OUT, raises_between_calls),
    )


def disagreements(
    other_tensor: Callable[[torch.Tensor], Callable[[Scene], None]], other_operation: Callable[[Scene], None]
) -> tuple[Fault[Callable[[Scene], None]], ...]:
    """The odd rank calls something else than the others (R11).

    Args:
        other_tensor: makes it gather this tensor.
        other_operation: makes it sum.
    """
    calls = {
        "calls with another size": other_tensor(torch.ones(2 * WORDS, dtype=torch.int32)),
        "calls with another dtype": other_tensor(torch.ones(WORDS)),
        "calls another operation": other_operation,
    }
    return tuple(
        Fault(f"{name}, device checks {'on' if checks else 'off'}", ending, work, EVERY_RANK, device_checks=checks)
        for name, work in calls.items()
        for checks, ending in ((True, MISMATCH), (False, ANYTHING))
    )


def wraps(
    right_calls: Callable[[Scene], None], never_arrives: Callable[[Scene], None]
) -> tuple[Fault[Callable[[Scene], None]], ...]:
    """The 32-bit count of calls goes over its end: in right calls, and in the one that a rank stays away from (R6)."""
    return (
        Fault(
            "counts over the end of 32 bits", GOES_ON, right_calls, EVERY_RANK,
            generation=GENERATION_MASK - CALLS_BEFORE - 2,
        ),
        Fault(
            "never arrives just when the count wraps", replace(TIMED_OUT, places=((0, 1),)), never_arrives,
            generation=GENERATION_MASK + 1 - CALLS_BEFORE,
        ),
    )  # fmt: skip
