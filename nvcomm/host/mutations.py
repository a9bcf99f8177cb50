# SPDX-License-Identifier: Apache-2.0
"""Deliberate breaks, one rule each: the negative controls of tests and stress. No program of a user comes here.

A test that passes with its rule off proves nothing, so each rule that the code keeps can be switched off by name.
"""

from __future__ import annotations

import math

from nvcomm.host.late_copy import LateCopy
from nvcomm.host.port import Port
from nvcomm.host.steps import Row, Steps
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import EMPTY_WORD, Bytes, Words, clear_words


class ClearsAfterNextPublish(Steps):
    """R1 off: what a call collected is cleared at the end of the next call, after that call's publish."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._held: list[Words] = []
        self._due: list[Words] = []

    def clear(self, row: Row, start: int, stop: int) -> None:
        self._held.append(row.words[start:stop])

    def collect(self, rows: list[Row], waiting: Waiting) -> None:
        super().collect(rows, waiting)
        self.clear_due()
        self._due, self._held = self._held, []

    def clear_due(self) -> None:
        """Too late: a peer may have published the next generation of the slot."""
        for words in self._due:
            clear_words(words)


class OwnRowFromRegisters(Steps):
    """R2 off: the own row is neither waited for nor cleared."""

    def finish(self, payload: Bytes, out: Bytes) -> None:
        out[self.port.rank] = payload

    def sources(self) -> list[int]:
        return [rank for rank in super().sources() if rank != self.port.rank]


class ClearsByPreviousSize(Steps):
    """R3 off: clears what the previous call would have collected."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, device_checks)
        self._previous_words = 0

    def clear(self, row: Row, start: int, stop: int) -> None:
        clear_words(row.words[start : min(stop, self._previous_words)])

    def collect(self, rows: list[Row], waiting: Waiting) -> None:
        super().collect(rows, waiting)
        self._previous_words = max(len(row.words) for row in rows)


class LastWordSpeaksForAll(Steps):
    """R4 off: a block counts as arrived when its last word has."""

    def first_missing(self, block: Words) -> int:
        return len(block) - 1 if block[-1] == EMPTY_WORD else -1


class NoEscapes(Steps):
    """R5 off: reserved words travel as payload."""

    def escape(self, words: Words) -> tuple[Words, list[tuple[int, Words]], int]:
        return words, [], 0


class FrozenSlot(Steps):
    """R6 off: every call uses the slot and generation of the first, as a captured host argument would."""

    def step(self) -> None:
        pass


class WaitsForEver(Steps):
    """R10 off: no wait is bounded."""

    def timeout_s(self) -> float:
        return math.inf


class HeadersNotCompared(Steps):
    """R11 off: ranks do not compare their calls."""

    def __init__(self, port: Port, device_checks: int) -> None:
        super().__init__(port, 0)


class EmptyCallAdvances(Steps):
    """R12 off: a call in which nobody sends takes a generation, and waits for nobody."""

    def empty_call(self) -> None:
        self.step()


# R7 (overlapping calls) and R10b (what reset() does) are kept by the engine, which asks for their names.
ENGINE_RULES = frozenset({"R7", "R10b"})
_STEPS: dict[str, type[Steps]] = {
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


def steps_type(mutations: frozenset[str]) -> type[Steps]:
    """The steps with the rules of `mutations` off."""
    broken = tuple(_STEPS[name] for name in sorted(mutations) if name in _STEPS)
    return type("MutatedSteps", broken, {}) if broken else Steps
