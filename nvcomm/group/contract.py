# SPDX-License-Identifier: Apache-2.0
"""What a group of ranks promises, whatever carries their words."""

from __future__ import annotations

from typing import Protocol, TypeAlias

JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"

MAX_ANSWER_BYTES = 64 << 10
DEFAULT_TIMEOUT_S = 30.0


class Group(Protocol):
    """Ranks that can tell each other small things. Every method is collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, tag: str, value: JSON, timeout_s: float) -> list[JSON]:
        """Tells every rank `value` and returns what every rank told, indexed by rank.

        Args:
            tag: what the exchange is about; must be the same on every rank.
            value: at most `MAX_ANSWER_BYTES` as JSON text.
            timeout_s: bound of the wait, from this rank's call.

        Raises:
            UsageError: `value` is not JSON or too large; the other ranks raise GroupError at once.
            GroupError: a rank did not answer (`missing` names it), or is at another tag, or its answer is no JSON.
            CapabilityError: ranks disagree on the world size; the same text on every rank.
        """
        ...

    def barrier(self, tag: str, timeout_s: float) -> None:
        """Returns once every rank is here. Raises as `exchange` does."""
        ...
