# SPDX-License-Identifier: Apache-2.0
"""PTX as a list of instructions with a control flow graph, and which kernel parameters each address comes from.

A register's origins are the roles of all parameters that any of its definitions was computed from, whatever the
order of execution: an over-approximation, so a check that forbids something cannot miss it. What is loaded from memory
has no origin; so that no pointer hides there, `escapes` lists stores of pointers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_REGISTER = re.compile(r"%[A-Za-z_]\w*(?:\.\w+)?|\b[a-z]\w*\b")
_STATEMENT = re.compile(
    r"(?:(?P<label>[$\w]+):)?\s*(?:@(?P<negate>!?)(?P<predicate>%?\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<rest>.*)",
    re.DOTALL,
)
_WRITES_NOTHING = (
    "st.",
    "red.",
    "bra",
    "bar.",
    "barrier.",
    "fence",
    "membar",
    "ret",
    "exit",
    "trap",
    "griddepcontrol",
    "brx",
)
Fact = TypeVar("Fact")
MEMORY = ("ld.", "ldu.", "st.", "atom.", "red.", "multimem.", "cp.", "prefetch", "discard", "applypriority")


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all its modifiers.
        operands: texts between top-level commas.
        predicate: register that guards it, or None.
        labels: that stand before it.
    """

    opcode: str
    operands: list[str]
    predicate: str | None = None
    labels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".strip()

    @property
    def is_memory(self) -> bool:
        """Whether it touches memory outside the parameters."""
        return self.opcode.startswith(MEMORY) and not self.opcode.startswith("ld.param")

    @property
    def stores(self) -> bool:
        """Whether it may change memory that others see."""
        if self.opcode.startswith("multimem."):
            return not self.opcode.startswith("multimem.ld_reduce")
        return self.opcode.startswith(("st.", "red.", "atom.", "cp.reduce", "cp.async.bulk")) and not re.search(
            r"\.(shared|local|param)\b", self.opcode
        )

    @property
    def address(self) -> str:
        """The first operand in brackets, without them."""
        return next((text.strip()[1:-1] for text in self.operands if text.strip().startswith("[")), "")

    @property
    def written(self) -> list[str]:
        """Registers that it defines."""
        if not self.operands or self.opcode.startswith(_WRITES_NOTHING) or self.opcode.startswith("multimem.st"):
            return []
        return registers(self.operands[0])

    @property
    def data(self) -> list[str]:
        """Registers that it reads as values: everything but what it defines and its address."""
        rest = self.operands[1:] if self.written else self.operands
        return [name for text in rest if not text.strip().startswith("[") for name in registers(text)]


@dataclass
class Kernel:
    """One `.entry`.

    Attributes:
        name: its symbol.
        parameters: names, in order.
        body: its instructions.
    """

    name: str
    parameters: list[str]
    body: list[Instruction]

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


def registers(text: str) -> list[str]:
    """Register names in an operand; `%tid.x` and labels come too, and have no origin."""
    return _REGISTER.findall(text)


def parse(ptx: str) -> list[Kernel]:
    """Every `.entry` of a PTX module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    kernels = []
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, flags=re.DOTALL):
        parameters = re.findall(r"\.param\s+[^,]*?([\w$]+)(?:\[\d+\])?\s*(?:,|$)", match[2].strip())
        kernels.append(Kernel(match[1], parameters, _body(text[match.end() : _closing(text, match.end())])))
    return kernels


def _closing(text: str, at: int) -> int:
    """Index of the brace that closes the one before `at`."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError("unbalanced braces")


def _body(text: str) -> list[Instruction]:
    body: list[Instruction] = []
    labels: list[str] = []
    for raw in text.split(";"):
        statement = raw.strip()
        # Braces of a scope open a statement; braces of a vector stand inside one.
        while statement[:1] in {"{", "}"} and statement:
            statement = statement[1:].strip()
        while found := re.match(r"([$\w]+):\s*", statement):
            labels.append(found[1])
            statement = statement[found.end() :].lstrip("{} \n\t")
        if not statement or statement.startswith("."):
            continue
        match = _STATEMENT.fullmatch(statement)
        if match is None:
            raise ValueError(f"PTX statement not understood: {statement!r}")
        body.append(Instruction(match["opcode"], _operands(match["rest"]), match["predicate"], labels))
        labels = []
    if labels:  # a label at the very end: the function falls off there
        body.append(Instruction("ret", [], None, labels))
    return body


def _operands(text: str) -> list[str]:
    """Splits at commas outside of braces and brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [*parts, part.strip()] if part.strip() else parts
