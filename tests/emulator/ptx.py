# SPDX-License-Identifier: Apache-2.0
"""PTX text as instructions, for the emulator and for the compile checks.

Names that a block in braces declares (inline assembly is such a block) get a suffix of their own, registers and labels
alike, so that every name means one thing in the whole kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(?:\.\w+\s+(?:\d+\s+)?)*([\w$]+)(?:\[(\d+)\])?")
# A brace that opens or closes a block, a label, or a statement; braces of a vector stand inside a statement.
_TOKEN = re.compile(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;{}\s][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
_STATEMENT = re.compile(r"(?:@(!?)\s*(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_OPERAND = re.compile(r"(?:[^,{\[(]|\{[^}]*\}|\[[^\]]*\]|\([^)]*\))+")
_REGISTER = re.compile(r"%[A-Za-z_]\w*(?:\.\w+)?|\b[a-z]\w*\b")
_WRITES_NOTHING = (
    "st.", "red.", "bra", "bar.", "barrier.", "fence", "membar", "ret", "exit", "trap", "griddepcontrol", "brx",
)  # fmt: skip
_MEMORY = ("ld.", "ldu.", "st.", "atom.", "red.", "multimem.", "cp.", "prefetch", "discard", "applypriority")
_NAME = re.compile(r"(?<![%\w$])[A-Za-z_]\w*")


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all its modifiers.
        operands: texts between top-level commas.
        predicate: register that guards it, or None.
        negated: whether it runs where the predicate is false.
        labels: that stand before it.
    """

    opcode: str
    operands: list[str]
    predicate: str | None = None
    negated: bool = False
    labels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".strip()

    @property
    def is_memory(self) -> bool:
        """Whether it touches memory outside the parameters."""
        return self.opcode.startswith(_MEMORY) and not self.opcode.startswith("ld.param")

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
        return next((text[1:-1] for text in self.operands if text.startswith("[")), "")

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
        return [name for text in rest if not text.startswith("[") for name in registers(text)]


@dataclass
class Kernel:
    """One `.entry`.

    Attributes:
        name: its symbol.
        parameters: names, in order.
        parameter_bytes: size of each; a structure is one parameter.
        registers: name -> type without the dot; a declared range such as `%r<9>` stands under `%r`.
        body: its instructions.
    """

    name: str
    parameters: list[str]
    parameter_bytes: list[int]
    registers: dict[str, str] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)


def registers(text: str) -> list[str]:
    """Register names in an operand; `%tid.x` and labels come too."""
    return _REGISTER.findall(text)


def parse(ptx: str) -> list[Kernel]:
    """Every `.entry` of a PTX module.

    Raises:
        ValueError: a statement that is not understood.
    """
    text = _COMMENT.sub("", ptx)
    kernels = []
    for match in _ENTRY.finditer(text):
        found = _PARAMETER.findall(match[2])
        sizes = [int(bits) // 8 * int(count or 1) for bits, _, count in found]
        kernels.append(Kernel(match[1], [name for _, name, _ in found], sizes))
        _read_body(kernels[-1], text, match.end())
    return kernels


def _read_body(kernel: Kernel, text: str, at: int) -> None:
    scopes: list[dict[str, str]] = [{}]
    num_blocks = 0
    labels: list[str] = []
    while scopes:
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"PTX not understood: {text[at : at + 80]!r}")
        at = token.end()
        brace, label, statement = token.groups()
        if brace == "{":
            num_blocks += 1
            scopes.append(_labels_of(text, at, num_blocks))
        elif brace == "}":
            scopes.pop()
        elif label:
            labels.append(_renamed(label, scopes))
        elif statement.startswith(".reg"):
            _declare(kernel, statement, scopes, num_blocks)
        elif not statement.startswith("."):
            found = _STATEMENT.fullmatch(statement)
            if found is None:
                raise ValueError(f"PTX statement not understood: {statement!r}")
            negated, predicate, opcode, rest = found.groups()
            operands = [_renamed(one.strip(), scopes) for one in _OPERAND.findall(rest) if one.strip()]
            guard = _renamed(predicate, scopes) if predicate else None
            kernel.body.append(Instruction(opcode, operands, guard, bool(negated), labels))
            labels = []
    if labels or not kernel.body or kernel.body[-1].opcode not in {"ret", "exit"} or kernel.body[-1].predicate:
        kernel.body.append(Instruction("ret", [], None, False, labels))  # the function falls off its end


def _labels_of(text: str, at: int, block: int) -> dict[str, str]:
    """Labels are used before they are declared."""
    names = re.findall(r"(?<![\w:$.])([A-Za-z_]\w*):(?!:)", text[at : text.index("}", at)])
    return {name: f"{name}__{block}" for name in names}


def _declare(kernel: Kernel, statement: str, scopes: list[dict[str, str]], block: int) -> None:
    found = _DECLARATION.fullmatch(statement)
    assert found is not None, statement
    for name in (one.strip() for one in found[2].split(",")):
        plain = name.partition("<")[0]
        unique = plain if len(scopes) == 1 else f"{plain}__{block}"
        scopes[-1][plain] = unique
        kernel.registers[unique] = found[1]


def _renamed(text: str, scopes: list[dict[str, str]]) -> str:
    if len(scopes) == 1:
        return text

    def rename(match: re.Match[str]) -> str:
        return next((scope[match[0]] for scope in reversed(scopes) if match[0] in scope), match[0])

    return _NAME.sub(rename, text)
