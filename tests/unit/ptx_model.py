# SPDX-License-Identifier: Apache-2.0
"""PTX with its control flow graph, and which kernel parameters each address comes from.

A register's origins are the roles of all parameters that any of its definitions was computed from, whatever the
order of execution: an over-approximation, so a check that forbids something cannot miss it. What is loaded from memory
has no origin; so that no pointer hides there, `escapes` lists stores of pointers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tests.emulator import ptx
from tests.emulator.ptx import Instruction, registers

Fact = TypeVar("Fact")


class Kernel(ptx.Kernel):
    """One `.entry`, followed along all its paths."""

    def successors(self, index: int) -> list[int]:
        """Where control may go from instruction `index`."""
        one = self.body[index]
        base = one.opcode.split(".")[0]
        after = [index + 1] if index + 1 < len(self.body) else []
        if base in {"ret", "exit", "trap"}:
            return after if one.predicate else []
        if base == "bra":
            return [self._labelled(one.operands[0]), *(after if one.predicate else [])]
        if base in {"brx", "call"}:
            raise NotImplementedError(f"the compile checks do not follow `{one}`")
        return after

    def origins(self, roles: Mapping[int, str]) -> dict[str, frozenset[str]]:
        """Register -> roles of the parameters it was computed from. `roles`: parameter index -> role."""
        of_parameter = {self.parameters[index]: role for index, role in roles.items()}
        found: dict[str, frozenset[str]] = {}
        changed = True
        while changed:
            changed = False
            for one in self.body:
                if one.opcode.startswith("ld.param"):
                    name = re.split(r"[+\s]", one.address)[0]
                    new = frozenset({of_parameter[name]} if name in of_parameter else ())
                elif one.is_memory or ".pred" in one.opcode or one.opcode.startswith("setp"):
                    continue
                else:
                    new = frozenset().union(*(found.get(name, frozenset()) for name in one.data))
                for name in one.written:
                    if not new <= found.get(name, frozenset()):
                        found[name] = found.get(name, frozenset()) | new
                        changed = True
        return found

    def accesses(self, roles: Mapping[int, str]) -> Iterator[tuple[int, Instruction, frozenset[str]]]:
        """(index, memory instruction, roles its address comes from)."""
        origins = self.origins(roles)
        for index, one in enumerate(self.body):
            if one.is_memory:
                yield (
                    index,
                    one,
                    frozenset().union(*(origins.get(name, frozenset()) for name in registers(one.address))),
                )

    def escapes(self, roles: Mapping[int, str]) -> Iterator[tuple[Instruction, frozenset[str]]]:
        """Memory instructions that put a pointer where this analysis loses it."""
        origins = self.origins(roles)
        for one in self.body:
            if one.is_memory:
                kept = frozenset().union(*(origins.get(name, frozenset()) for name in one.data))
                if kept:
                    yield one, kept

    def flow(
        self, entry: Fact, unreached: Fact, step: Callable[[int, Fact], Fact], join: Callable[[Fact, Fact], Fact]
    ) -> list[Fact]:
        """The fact before each instruction, joined over all paths to it.

        Args:
            entry: the fact at the entry.
            unreached: the neutral element of `join`, for code that cannot be reached.
            step: (index of an instruction, fact before it) -> fact after it.
            join: the fact where two paths meet: "and" for what must be so, "or" or a union for what may be.
        """
        before = [unreached] * len(self.body)
        before[0] = entry
        todo = list(range(len(self.body)))
        while todo:
            index = todo.pop()
            after = step(index, before[index])
            for successor in self.successors(index):
                joined = join(before[successor], after)
                if joined != before[successor]:
                    before[successor] = joined
                    todo.append(successor)
        return before

    def _labelled(self, label: str) -> int:
        return next(index for index, one in enumerate(self.body) if label in one.labels)


def parse(text: str) -> list[Kernel]:
    """Every `.entry` of a PTX module."""
    return [Kernel(**vars(one)) for one in ptx.parse(text)]
