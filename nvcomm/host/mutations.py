# SPDX-License-Identifier: Apache-2.0
"""Deliberate breaks, one rule each: the negative controls of tests and stress. No program of a user comes here.

A test that passes with its rule off proves nothing, so each rule that the code keeps can be switched off by name.
"""

from __future__ import annotations

import math

from nvcomm.host import headers
from nvcomm.host.all_gather import AllGather, Row
from nvcomm.host.late_copy import LateCopy
from nvcomm.host.port import Port
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import EMPTY_WORD, Bytes, Words, clear_words


class ClearsAfterNextPublish(AllGather):
    """R1 off: what a call collected is cleared at the end of the next call, after that call's publish."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._held: list[Words] = []
        self._due: list[Words] = []

    def clear(self, row: Row, start: int, stop: int) -> None:
        self._held.append(row.words[start:stop])

    def collect(self, slot: int, num_words: int, out: Bytes, waiting: Waiting) -> None:
        super().collect(slot, num_words, out, waiting)
        self.clear_due()
        self._due, self._held = self._held, []

    def clear_due(self) -> None:
        """Too late: a peer may have published the next generation of the slot."""
        for words in self._due:
            clear_words(words)


class OwnRowFromRegisters(AllGather):
    """R2 off: the own row is neither waited for nor cleared."""

    def run(self, payload: Bytes, out: Bytes, call: headers.Call) -> None:
        super().run(payload, out, call)
        out[self.port.rank] = payload

    def sources(self) -> list[int]:
        return [rank for rank in super().sources() if rank != self.port.rank]


class ClearsByPreviousSize(AllGather):
    """R3 off: clears what the previous call would have collected."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._previous_words = 0

    def clear(self, row: Row, start: int, stop: int) -> None:
        clear_words(row.words[start : min(stop, self._previous_words)])

    def collect(self, slot: int, num_words: int, out: Bytes, waiting: Waiting) -> None:
        super().collect(slot, num_words, out, waiting)
        self._previous_words = num_words


class LastWordSpeaksForAll(AllGather):
    """R4 off: a block counts as arrived when its last word has."""

    def first_missing(self, block: Words) -> int:
        return len(block) - 1 if block[-1] == EMPTY_WORD else -1


class NoEscapes(AllGather):
    """R5 off: reserved words travel as payload."""

    def escape(self, words: Words) -> tuple[Words, list[tuple[int, Words]], int]:
        return words, [], 0


class FrozenSlot(AllGather):
    """R6 off: every call uses the slot and generation of the first, as a captured host argument would."""

    def advance(self) -> None:
        pass


class WaitsForEver(AllGather):
    """R10 off: no wait is bounded."""

    def timeout_s(self) -> float:
        return math.inf


class HeadersNotCompared(AllGather):
    """R11 off: ranks do not compare their calls."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, 0)


class EmptyCallAdvances(AllGather):
    """R12 off: a call in which nobody sends takes a generation, and waits for nobody."""

    def empty_call(self) -> None:
        self.advance()


# R7 (overlapping calls) and R10b (what reset() does) are kept by the engine, which asks for their names.
ENGINE_RULES = frozenset({"R7", "R10b"})
_STEPS: dict[str, type[AllGather]] = {
    "R1": ClearsAfterNextPublish,
    "R2": OwnRowFromRegisters,
    "R3": ClearsByPreviousSize,
    "R4": LastWordSpeaksForAll,
    "R5": NoEscapes,
    "R6": FrozenSlot,
    "R10": WaitsForEver,
    "R11": HeadersNotCompared,
    "R12": EmptyCallAdvances,
    "late-copy": LateCopy,
}
MUTATIONS = frozenset(_STEPS) | ENGINE_RULES


def all_gather_type(mutations: frozenset[str]) -> type[AllGather]:
    """The all-gather with the rules of `mutations` off."""
    broken = tuple(_STEPS[name] for name in sorted(mutations) if name in _STEPS)
    return type("MutatedAllGather", broken, {}) if broken else AllGather
