# SPDX-License-Identifier: Apache-2.0
"""PTX of one kernel as C++ against runtime.h: one statement an instruction, registers as arrays, labels as labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_ARRAYS = {"%p": "P", "%rs": "H", "%r": "R", "%rd": "D"}
_CTYPE = {"pred": "bool", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t"}
_SPECIAL = {
    "%tid.x": "emu::m->now->tid",
    "%ctaid.x": "(emu::m->first_block + emu::m->now->cta)",
    "%laneid": "(emu::m->now->tid % 32)",
    "%lanemask_lt": "((1u << (emu::m->now->tid % 32)) - 1)",
    "__dynamic_shmem__0": "emu::SHARED_BASE",
}
_SIGNED = {8: "int8_t", 16: "int16_t", 32: "int32_t", 64: "int64_t"}
_UNSIGNED = {8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


def statements(body: str) -> Iterator[str]:
    """Statements, and "{" and "}" where they open and close blocks; braces of vector operands stay inside."""
    text = ""
    for char in re.sub(r"//[^\n]*", "", body):
        if char in "{}" and not text.strip():
            yield char
            text = ""
        elif char == ";":
            yield text.strip()
            text = ""
        elif char == ":" and re.fullmatch(r"\s*[$\w]+", text):
            yield text.strip() + ":"
            text = ""
        else:
            # `shared::cta` has colons of its own: they follow an opcode with a dot, or come in pairs.
            text += char


def kernel_body(ptx: str) -> tuple[list[str], str]:
    """Parameter names, and what is between the braces of the entry."""
    head, _, rest = ptx.partition(".entry")
    del head
    params = re.findall(r"\.param \.\w+ (\w+)", rest[: rest.index(")")])
    return params, rest[rest.index("{") + 1 : rest.rindex("}")]


def transpile(ptx: str) -> str:
    """C++ source.

    Raises:
        NotImplementedError: an instruction that runtime.h does not know.
    """
    params, body = kernel_body(ptx)
    lines = ['#include "runtime.h"', "static void kernel() {"]
    scopes: list[dict[str, str]] = [{}]
    num_blocks = 0
    for number, statement in enumerate(statements(body)):
        if statement == "{":
            num_blocks += 1
            scopes.append({"": str(num_blocks)})
            lines.append("{")
        elif statement == "}":
            scopes.pop()
            lines.append("}")
        elif statement.startswith(".pragma"):
            continue
        elif statement.startswith(".reg"):
            lines.append(_declare(statement, scopes))
        elif statement.endswith(":"):
            lines.append(_label(statement[:-1], scopes) + ":;")
        elif statement:
            lines.append(_instruction(statement, number, params, scopes))
    lines += ["}", '#include "main.h"', ""]
    return "\n".join(lines)


def _label(name: str, scopes: list[dict[str, str]]) -> str:
    block = "" if name.startswith("$") else scopes[-1].get("", "")
    return "L" + re.sub(r"\W", "_", name) + (f"_{block}" if block else "")


def _declare(statement: str, scopes: list[dict[str, str]]) -> str:
    kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
    if array := re.fullmatch(r"(%\w+?)<(\d+)>", names.strip()):
        return f"{_CTYPE[kind]} {_ARRAYS[array[1]]}[{array[2]}];"
    declared = []
    for name in (one.strip() for one in names.split(",")):
        scopes[-1][name] = f"{name}_{scopes[-1]['']}"
        declared.append(scopes[-1][name])
    return f"{_CTYPE[kind]} {', '.join(declared)};"


def _instruction(statement: str, site: int, params: list[str], scopes: list[dict[str, str]]) -> str:
    guard = ""
    if found := re.match(r"@(!?)(\S+)\s+(.*)", statement, re.S):
        guard = f"if ({found[1]}{_operand(found[2], scopes)}) "
        statement = found[3]
    opcode, _, rest = statement.partition(" ") if " " in statement else statement.partition("\t")
    operands = [one.strip() for one in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*", rest.strip())]
    code = _Code(opcode.strip(), operands, site, params, scopes).emit()
    return f"{guard}{{ emu::m->now->site = {site}; {code} }}"


def _operand(text: str, scopes: list[dict[str, str]]) -> str:
    text = text.strip()
    if text in _SPECIAL:
        return _SPECIAL[text]
    if found := re.fullmatch(r"(%[a-z]+)(\d+)", text):
        return f"{_ARRAYS[found[1]]}[{found[2]}]"
    for scope in reversed(scopes):
        if text in scope and text:
            return scope[text]
    if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", text):
        return f"{text}ll" if not text.startswith("0x") else f"{text}ull"
    raise NotImplementedError(f"operand {text!r}")


class _Code:
    """The C++ of one instruction."""

    def __init__(
        self, opcode: str, operands: list[str], site: int, params: list[str], scopes: list[dict[str, str]]
    ) -> None:
        self.opcode, self.operands, self.site, self.params, self.scopes = opcode, operands, site, params, scopes
        self.parts = opcode.split(".")

    def emit(self) -> str:
        for pattern, handler in _HANDLERS:
            if found := re.fullmatch(pattern, self.opcode):
                return handler(self, *found.groups())
        raise NotImplementedError(f"instruction {self.opcode} {', '.join(self.operands)}")

    def __getitem__(self, i: int) -> str:
        return _operand(self.operands[i], self.scopes)

    def vector(self, i: int) -> list[str]:
        return [_operand(one, self.scopes) for one in self.operands[i].strip("{}").split(",")]

    def pair(self, i: int) -> tuple[str, str | None]:
        """`d|p`: a result and a predicate beside it."""
        first, _, second = self.operands[i].partition("|")
        return _operand(first, self.scopes), _operand(second, self.scopes) if second else None

    def address(self, i: int) -> str:
        inner = self.operands[i].strip("[]")
        base, sign, offset = re.fullmatch(r"([^+-]+)(?:([+-])\s*(-?\d+))?", inner).groups()
        value = _operand(base, self.scopes)
        return f"({value} {sign} ({offset}))" if offset else value

    def typed(self, i: int, kind: str) -> str:
        """Operand i read as `s32`, `u16`, ..."""
        width = int(kind[1:])
        table = _SIGNED if kind[0] == "s" else _UNSIGNED
        return f"(({table[width]}){self[i]})"


def _arith(c: _Code, name: str, kind: str) -> str:
    if kind == "pred":
        return f"{c[0]} = {c[1]} {_BINARY[name]} {c[2]};"
    return f"{c[0]} = {c.typed(1, 'u' + kind[1:])} {_BINARY[name]} {c.typed(2, 'u' + kind[1:])};"


def _memory_bytes(kind: str) -> int:
    return int(kind[1:]) // 8


def _space(c: _Code, space: str, address: str, num_bytes: int, *, write: bool) -> str:
    if space == "global":
        return f"emu::global({address}, {num_bytes}, {str(write).lower()})"
    if space == "shared::cluster":
        return f"emu::cluster_shared({address}, {num_bytes})"
    return f"emu::own_shared({address}, {num_bytes})"


def _ld(c: _Code, space: str, vector: str | None, kind: str) -> str:
    size = _memory_bytes(kind)
    count = int(vector) if vector else 1
    place = _space(c, space, c.address(1), size * count, write=False)
    targets = c.vector(0) if vector else [c[0]]
    ctype = _UNSIGNED[size * 8]
    # All words are read before a register changes: the address may be one of them.
    code = f"auto* p_ = {place};"
    return code + "".join(f" {t} = emu::load<{ctype}>(p_ + {i * size});" for i, t in enumerate(targets))


def _st(c: _Code, space: str, vector: str | None, kind: str) -> str:
    size = _memory_bytes(kind)
    count = int(vector) if vector else 1
    place = _space(c, space, c.address(0), size * count, write=True)
    values = c.vector(1) if vector else [c[1]]
    ctype = _UNSIGNED[size * 8]
    return f"auto* p_ = {place};" + "".join(
        f" emu::store<{ctype}>(p_ + {i * size}, ({ctype}){v});" for i, v in enumerate(values)
    )


def _shfl(c: _Code, mode: str) -> str:
    target, flag = c.pair(0)
    source = f"((int){c[2]} & 31)" if mode == "idx" else f"(emu::m->now->tid % 32 - (int){c[2]})"
    # Every lane reads its own source: the value is looked up after the meeting.
    code = f"int from_ = {source}; bool in_ = from_ >= 0; if (!in_) from_ = emu::m->now->tid % 32;"
    code += (
        f" uint32_t value_ = {c[1]}; emu::meet({c.site}, value_, [](const uint32_t* in, int i) {{ return in[i]; }});"
    )
    code += f" {target} = emu::m->ctas[emu::m->now->cta].warps[emu::m->now->tid / 32].out[from_];"
    return code + (f" {flag} = in_;" if flag else "")


def _redux(c: _Code, name: str) -> str:
    start, step = {"add": ("0", "r += in[k]"), "max": ("0", "r = in[k] > r ? in[k] : r")}[name]
    body = f"uint32_t r = {start}; for (int k = 0; k < 32; k++) {step}; return r;"
    return f"{c[0]} = emu::meet({c.site}, {c[1]}, [](const uint32_t* in, int) {{ {body} }});"


def _ballot(c: _Code) -> str:
    body = "uint32_t r = 0; for (int k = 0; k < 32; k++) r |= in[k] << k; return r;"
    return f"{c[0]} = emu::meet({c.site}, {c[1]} ? 1 : 0, [](const uint32_t* in, int) {{ {body} }});"


def _setp(c: _Code, compare: str, kind: str) -> str:
    if kind == "bf16x2":
        low, high = c.pair(0)
        a, b = c[1], c[2]
        return (
            f"uint32_t a_ = {a}, b_ = {b}; {low} = emu::{compare}(a_ & 0xffff, b_ & 0xffff); "
            f"{high} = emu::{compare}(a_ >> 16, b_ >> 16);"
        )
    kind = kind.replace("b", "u")
    return f"{c[0]} = {c.typed(1, kind)} {_COMPARE[compare]} {c.typed(2, kind)};"


def _minmax(c: _Code, name: str, relu: str | None, kind: str) -> str:
    sign = "<" if name == "min" else ">"
    code = f"auto a_ = {c.typed(1, kind)}; auto b_ = {c.typed(2, kind)}; auto v_ = a_ {sign} b_ ? a_ : b_;"
    return code + (" if (v_ < 0) v_ = 0;" if relu else "") + f" {c[0]} = v_;"


def _mul_wide(c: _Code, kind: str) -> str:
    wide = kind[0] + str(2 * int(kind[1:]))
    ctype = (_SIGNED if kind[0] == "s" else _UNSIGNED)[int(wide[1:])]
    return f"{c[0]} = ({ctype}){c.typed(1, kind)} * ({ctype}){c.typed(2, kind)};"


def _cvt(c: _Code, to: str, source: str) -> str:
    ctype = (_SIGNED if to[0] == "s" else _UNSIGNED)[int(to[1:])]
    return f"{c[0]} = ({ctype}){c.typed(1, source)};"


def _st_async(c: _Code, vector: str | None) -> str:
    words = ", ".join(f"(uint32_t){v}" for v in (c.vector(1) if vector else [c[1]]))
    return f"emu::store_async({c.address(0)}, {{{words}}}, {c.address(2)});"


def _red_async(c: _Code) -> str:
    return f"emu::reduce_async({c.address(0)}, {c[1]}, {c.address(2)});"


def _mov(c: _Code, kind: str) -> str:
    return f"{c[0]} = {c[1]};"


def _ld_param(c: _Code, kind: str) -> str:
    index = c.params.index(c.operands[1].strip("[]"))
    return f"{c[0]} = ({_UNSIGNED[int(kind[1:])]})emu::m->params[{index + 1}];"


def _add_shared(c: _Code, space: str) -> str:
    return f"emu::fetch_add({_space(c, space, c.address(0), 4, write=True)}, {c[1]});"


def _atom_shared(c: _Code) -> str:
    return f"{c[0]} = emu::fetch_add({_space(c, 'shared', c.address(1), 4, write=True)}, {c[2]});"


def _bar(c: _Code, kind: str) -> str:
    count = c[1] if len(c.operands) > 1 else "emu::m->threads"
    return f"emu::bar({c[0]}, {count}, {str(kind == 'sync').lower()});"


_HANDLERS: list[tuple[str, Callable[..., str]]] = [
    (r"mov\.(pred|[bus]\d+)", _mov),
    (r"ld\.param\.([bus]\d+)", _ld_param),
    (r"ld\.(global|shared::cluster|shared)(?:\.v(\d))?\.([bus]\d+)", _ld),
    (r"st\.(global|shared::cluster|shared)(?:\.v(\d))?\.([bus]\d+)", _st),
    (r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v(\d))?\.b32", _st_async),
    (r"red\.async\.\S+\.shared::cluster\.mbarrier::complete_tx::bytes\.add\.u32", _red_async),
    (r"red\.relaxed\.(?:cta|cluster)\.(shared::cta|shared::cluster)\.add\.u32", _add_shared),
    (r"atom\.relaxed\.cta\.shared::cta\.add\.u32", _atom_shared),
    (r"mapa\.shared::cluster\.u32", lambda c: f"{c[0]} = emu::mapa({c[1]}, {c[2]});"),
    (r"mbarrier\.init\.shared::cta\.b64", lambda c: f"emu::mbarrier_init({c.address(0)}, {c[1]});"),
    (r"mbarrier\.arrive\.expect_tx\.\S+\.b64", lambda c: f"emu::mbarrier_arrive_expect({c.address(1)}, {c[2]});"),
    (r"mbarrier\.try_wait\.parity\.\S+\.b64", lambda c: f"{c[0]} = emu::mbarrier_wait({c.address(1)}, {c[2]});"),
    (r"bar\.(sync|arrive)", _bar),
    (r"barrier\.cluster\.arrive\S*", lambda c: "emu::cluster_arrive();"),
    (r"barrier\.cluster\.wait\S*", lambda c: "emu::cluster_wait();"),
    (r"bar\.warp\.sync", lambda c: f"emu::meet({c.site}, 0, [](const uint32_t*, int) {{ return 0u; }});"),
    (r"fence\.\S+|griddepcontrol\.\S+", lambda c: ""),
    (r"shfl\.sync\.(idx|up)\.b32", _shfl),
    (r"redux\.sync\.(add|max)\.[us]32", _redux),
    (r"vote\.sync\.ballot\.b32", _ballot),
    (r"max\.NaN\.bf16x2", lambda c: f"{c[0]} = emu::max_nan_pair({c[1]}, {c[2]});"),
    (r"prmt\.b32", lambda c: f"{c[0]} = emu::prmt({c[1]}, {c[2]}, {c[3]});"),
    (r"setp\.(\w+)\.(bf16x2|[bus]\d+)", _setp),
    (r"selp\.[bus]\d+", lambda c: f"{c[0]} = {c[3]} ? {c[1]} : {c[2]};"),
    (r"(add|sub|and|or|xor)\.(pred|[bus]\d+)", _arith),
    (r"not\.pred", lambda c: f"{c[0]} = !{c[1]};"),
    (r"not\.b\d+", lambda c: f"{c[0]} = ~{c[1]};"),
    (r"neg\.s\d+", lambda c: f"{c[0]} = -{c[1]};"),
    (r"(min|max)(\.relu)?\.([us]\d+)", _minmax),
    (r"mul\.lo\.[us]\d+", lambda c: f"{c[0]} = {c[1]} * {c[2]};"),
    (r"mul\.wide\.([us]\d+)", _mul_wide),
    (r"mad\.lo\.[us]\d+", lambda c: f"{c[0]} = {c[1]} * {c[2]} + {c[3]};"),
    (r"div\.([su](?:16|32))", lambda c, k: f"{c[0]} = {c.typed(1, k)} / {c.typed(2, k)};"),
    (r"shl\.b(\d+)", lambda c, w: f"{c[0]} = emu::shift_left<{_UNSIGNED[int(w)]}>({c[1]}, {c[2]});"),
    (r"shr\.u(\d+)", lambda c, w: f"{c[0]} = emu::shift_right<{_UNSIGNED[int(w)]}>({c[1]}, {c[2]});"),
    (r"shr\.s(\d+)", lambda c, w: f"{c[0]} = emu::shift_right<{_SIGNED[int(w)]}>({c[1]}, {c[2]});"),
    (
        r"shf\.l\.wrap\.b32",
        lambda c: f"uint32_t n_ = {c[3]} & 31; {c[0]} = n_ ? ({c[2]} << n_) | ({c[1]} >> (32 - n_)) : {c[2]};",
    ),
    (r"popc\.b32", lambda c: f"{c[0]} = __builtin_popcount({c[1]});"),
    (r"cvt\.([us]\d+)\.([us]\d+)", _cvt),
    (r"bra(?:\.uni)?", lambda c: f"goto {_label(c.operands[0], c.scopes)};"),
    (r"ret", lambda c: "return;"),
]
