# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/mailbox.md as switches, and what a rank's kernels do as lists of steps.

The defaults of `Rules` are the protocol. A configuration of the explorer is the protocol with one or two of these
fields changed; docs/model.md lists what each change breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum

from nvcomm import mailbox


class Step(IntEnum):
    """One thing that a grid does. Grids are tuples of steps; the machine gives each step its meaning."""

    WAIT = 0  # griddepcontrol.wait: the grid before this one has completed and its own stores have landed
    READ = 1  # read slot and generation from the state block
    LOCK = 2  # take the busy word (R7, device checks only)
    PUBLISH = 3  # store this call's words into every mailbox
    CLEAR = 4  # store EMPTY over another call's words: what protocols do that do not clear what they collected
    COLLECT = 5  # poll every word of this call in the own mailbox; clear each one where the rule says so
    ADVANCE = 6  # store the next slot and generation into the state block
    UNLOCK = 7  # give the busy word back
    FENCE = 8  # every store that this grid made to its own memory has landed
    TRIGGER = 9  # griddepcontrol.launch_dependents
    DRAIN = 10  # reset: every word this rank ever published has landed
    ARRIVE = 11  # reset: enter the barrier
    MEET = 12  # reset: leave it, everybody has entered
    BLANK = 13  # reset: store a word that is not EMPTY over every word of the own mailbox
    MARK = 14  # reset: publish EMPTY, which no call ever publishes, over every word of the own row, in every mailbox
    AWAIT = 15  # reset: poll every word of the own mailbox until it is EMPTY: the marker was there, and armed it
    ARM = 16  # reset: store EMPTY over every word of the own mailbox
    RENEW = 17  # reset: slot 0, an agreed generation, not broken


class Verdict(StrEnum):
    """What a search ends with."""

    OK = "OK"  # no failure exists
    STALE = "STALE"  # a word of another call, or of another rank, was handed on as payload
    TORN = "TORN"  # EMPTY was handed on as payload
    LOST = "LOST"  # a rank waits for ever for a word that had arrived and was overwritten or cleared
    DEADLOCK = "DEADLOCK"  # a rank waits for ever for a word that was never sent
    DIRTY = "DIRTY"  # everybody ended well, but a mailbox is not empty or ranks disagree on slot or generation
    OVERLAP = "OVERLAP"  # two calls were on the mailbox at once and the busy word reported it
    MISNAMED = "MISNAMED"  # the reports of the survivors do not lead to the rank that is gone


_S = Step
BARRIER = (_S.ARRIVE, _S.MEET)

# Plain stream order: a grid starts when the one before it has completed.
PLAIN = ((_S.READ, _S.PUBLISH, _S.COLLECT, _S.ADVANCE),)
CHECKED = ((_S.READ, _S.LOCK, _S.PUBLISH, _S.COLLECT, _S.ADVANCE, _S.UNLOCK),)
CLEAR_FIRST = ((_S.READ, _S.PUBLISH, _S.CLEAR, _S.COLLECT, _S.ADVANCE),)
CLEAR_LAST = ((_S.READ, _S.PUBLISH, _S.COLLECT, _S.CLEAR, _S.ADVANCE),)

# Programmatic dependent launch: a grid starts when the one before it has triggered or exited. R1 (i) puts WAIT before
# READ and PUBLISH, R1 (ii) puts TRIGGER behind FENCE, R1 (iii) is the early trigger.
PDL = ((_S.WAIT, _S.READ, _S.PUBLISH, _S.COLLECT, _S.ADVANCE, _S.FENCE, _S.TRIGGER),)
PDL_EARLY = ((_S.WAIT, _S.READ, _S.TRIGGER, _S.PUBLISH, _S.COLLECT, _S.ADVANCE),)
PDL_UNFENCED = ((_S.WAIT, _S.READ, _S.PUBLISH, _S.COLLECT, _S.ADVANCE),)  # exits, which triggers, without a fence
PDL_FENCED_EARLY = ((_S.WAIT, _S.READ, _S.PUBLISH, _S.COLLECT, _S.FENCE, _S.ADVANCE, _S.TRIGGER),)
PDL_READ_FIRST = ((_S.READ, _S.TRIGGER, _S.WAIT, _S.PUBLISH, _S.COLLECT, _S.ADVANCE),)
PDL_READ_FIRST_FENCED = ((_S.READ, _S.WAIT, _S.PUBLISH, _S.COLLECT, _S.ADVANCE, _S.FENCE, _S.TRIGGER),)
PDL_PUBLISH_FIRST = ((_S.READ, _S.PUBLISH, _S.TRIGGER, _S.WAIT, _S.COLLECT, _S.ADVANCE),)
_COLLECTOR = (_S.READ, _S.WAIT, _S.COLLECT, _S.ADVANCE, _S.FENCE, _S.TRIGGER)
PDL_SPLIT = ((_S.WAIT, _S.TRIGGER, _S.READ, _S.PUBLISH), _COLLECTOR)
PDL_SPLIT_EARLY = ((_S.TRIGGER, _S.WAIT, _S.READ, _S.PUBLISH), _COLLECTOR[:-2])
PDL_SPLIT_LATE = ((_S.WAIT, _S.TRIGGER, _S.READ, _S.PUBLISH), _COLLECTOR[:-2])

# A kernel of somebody else between two calls.
IDLE: tuple[Step, ...] = ()  # never waits
POLITE = (_S.WAIT,)

# reset() (R10b), with and without its parts.
RESET = (_S.DRAIN, *BARRIER, _S.ARM, _S.FENCE, _S.RENEW, *BARRIER)
RESET_NO_DRAIN = (*BARRIER, _S.ARM, _S.FENCE, _S.RENEW, *BARRIER)
RESET_NO_BARRIER_1 = (_S.DRAIN, _S.ARM, _S.FENCE, _S.RENEW, *BARRIER)
RESET_NO_BARRIER_2 = (_S.DRAIN, *BARRIER, _S.ARM, _S.FENCE, _S.RENEW)
_BLANKED = (_S.BLANK, _S.FENCE)
_MARKED = (_S.MARK, _S.AWAIT, _S.RENEW)
RESET_MARKED = (*_BLANKED, *BARRIER, *_MARKED, *BARRIER)
MARKED_NO_BLANK = (*BARRIER, *_MARKED, *BARRIER)
MARKED_NO_BARRIER_1 = (*_BLANKED, *_MARKED, *BARRIER)
MARKED_NO_BARRIER_2 = (*_BLANKED, *BARRIER, *_MARKED)


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol; every field is a switch and every default is the rule."""

    num_slots: int = mailbox.NUM_SLOTS
    # R1: what the grids of a call do, whether they overlap (PDL), which foreign kernel runs between two calls, and how
    # many calls later the clears have landed: 0 at completion (assumption A1), None never for certain.
    grids: tuple[tuple[Step, ...], ...] = PLAIN
    pdl: bool = False
    between: tuple[Step, ...] | None = None
    clears_land: int | None = 0
    own_row: bool = True  # R2: the own row is collected like any other
    rows: str = "fixed"  # R3: or "packed" by this call's size
    clear: str = "collected"  # R3: or "previous", "next", "previous by current size"
    atom: str = "word"  # R4: or "chunk": only the last word of a chunk is polled
    escape: str = "record"  # R5: or "raw" (nothing is escaped), "kept" (not cleared), "shared" (one area, all slots)
    slot_from: str = "device"  # R6: or "generation" (modulo), "host" (frozen into a graph)
    order: str = "same"  # R7: or "swapped" (ranks disagree), "overlap" (two streams, no event)
    empty_call: str = "nothing"  # R12: a call in which nobody sends does nothing, or "advances"
    tokens: bool = True  # R12: who sends a rank no data sends it a token
    two_shot: str = "global"  # R12: or "packed" places, "own by mailbox", "results not collected"
    report: str = "peers first"  # R10: whom a rank reports that waits for its own result too, or "any word"
    reset: tuple[Step, ...] = RESET  # R10b
    reset_slot: bool = True  # R10b: reset() takes every rank to the same slot
    in_order: bool = False  # assumption A2: one rank's publishes to one word land in order


PROTOCOL = Rules()


def rules_off(rules: Rules) -> str:
    """The fields that differ from the protocol, for the table."""
    names = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, tuple)}
    shown = []
    for field in fields(rules):
        value = getattr(rules, field.name)
        if value == getattr(PROTOCOL, field.name):
            continue
        name = next((n for n, steps in names.items() if steps == value and field.name in _STEP_FIELDS), None)
        shown.append(f"{field.name}={name or value}")
    return ", ".join(shown) or "-"


_STEP_FIELDS = ("grids", "between", "reset")


def without(**changes: object) -> Rules:
    """The protocol with some switches changed."""
    return replace(PROTOCOL, **changes)  # type: ignore[arg-type]
