# SPDX-License-Identifier: Apache-2.0
"""What must be true of a compiled mailbox kernel, whatever machine it was compiled on.

Each function takes PTX or SASS and raises AssertionError that names the instruction. Roles say what a kernel
parameter is: "mailbox" (a rank's mailbox), "multicast" (one address for all of them), "state" (slot and generation).
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.unit.ptx_model import Kernel

# Parameter name in the library's kernels -> role.
ROLES = {"peers": "mailbox", "multicast_ptr": "multicast", "state": "state"}
POINTERS = frozenset(ROLES.values())
Roles = Mapping[int, str]

_MULTIMEM = re.compile(r"multimem\.st\.relaxed\.sys\.global(\.v4)?\.f32")
_MAILBOX_LOAD = re.compile(r"ld\.relaxed\.sys\.global(\.v[24])?\.[bus]32")
# A release is for the fault row, whose first word says that the others are there (R10).
_MAILBOX_STORE = re.compile(r"st\.relaxed\.sys\.global(\.v[24])?\.[bus]32|st\.release\.sys\.global\.[bus]32")
_FENCE = re.compile(r"fence\.(acq_rel|sc)\.(gpu|sys)|membar\.(gl|sys)")
_BARRIER = re.compile(r"(bar|barrier(\.cta)?)\.sync\b")
_LOCAL = re.compile(r"\b(LDL|STL)(\.\S+)?\b")
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def parameter_roles(kernel: Any, fake_args: Sequence[Any]) -> dict[int, str]:
    """Index of a PTX parameter -> role, from the names in `kernel.__call__` and its placeholders.

    Lists are passed as one parameter for each element, named tuples as one for each field; the GPU function takes
    `__call__`'s parameters by name.
    """
    passed = dict(zip(inspect.signature(type(kernel).__call__).parameters, [kernel, *fake_args], strict=True))
    names: list[str] = []
    for name in list(inspect.signature(type(kernel).kernel).parameters)[1:]:
        one = passed[name]
        fields = one._asdict() if hasattr(one, "_asdict") else {name: one}
        for field, value in fields.items():
            names += [field] * (len(value) if isinstance(value, list) else 1)
    return {index: ROLES[name] for index, name in enumerate(names) if name in ROLES}


def check_multicast(kernel: Kernel, roles: Roles, *, used: bool) -> None:
    """PTX ISA 8.2.3: the multicast address is touched by multimem stores of 32-bit elements, which touch nothing else.

    Args:
        used: whether this variant publishes by multicast; if not, nothing may touch the address at all.
    """
    count = 0
    for _, one, origins in kernel.accesses(roles):
        is_multimem = one.opcode.startswith("multimem.")
        if "multicast" in origins:
            assert origins == {"multicast"}, f"`{one}`: its address mixes {sorted(origins)}"
            assert _MULTIMEM.fullmatch(one.opcode), f"`{one}` touches the multicast address"
            count += 1
        else:
            assert not is_multimem, f"`{one}`: its address does not come from the multicast parameter"
    assert (count > 0) == used, f"{count} multicast stores in {kernel.name}, wanted {'some' if used else 'none'}"


def check_mailbox(kernel: Kernel, roles: Roles, *, stores: bool) -> None:
    """R4: mailbox loads are ld.relaxed.sys and stores st.relaxed.sys, of 32-bit words; never `.nc`.

    Args:
        stores: whether there have to be stores through peer pointers (there are loads in any case).
    """
    loads = stored = 0
    for _, one, origins in kernel.accesses(roles):
        if "mailbox" not in origins:
            continue
        assert origins == {"mailbox"}, f"`{one}`: its address mixes {sorted(origins)}"
        if _MAILBOX_LOAD.fullmatch(one.opcode):
            loads += 1
        elif _MAILBOX_STORE.fullmatch(one.opcode):
            stored += 1
        else:
            raise AssertionError(f"`{one}` touches a mailbox; R4 wants ld.relaxed.sys and st.relaxed.sys of b32")
    assert loads, f"no mailbox loads in {kernel.name}: are its parameters called {sorted(ROLES)}?"
    assert stored or not stores, f"no mailbox stores in {kernel.name}"


def check_no_escape(kernel: Kernel, roles: Roles) -> None:
    """No pointer is stored to memory, where these checks would lose sight of it."""
    for one, kept in kernel.escapes(roles):
        raise AssertionError(f"`{one}` stores an address that comes from {sorted(kept)}")


def check_no_nc(kernel: Kernel, roles: Roles) -> None:
    """R4: nothing that a peer or an earlier grid writes is read through the non-coherent path."""
    for _, one, origins in kernel.accesses(roles):
        assert not (origins & POINTERS and ".nc" in one.opcode), f"`{one}` reads {sorted(origins)} without coherence"


def check_wait_first(kernel: Kernel, roles: Roles, *, pdl: bool) -> None:
    """R1 (i): griddepcontrol.wait runs, on every path, before the first access to state or mailbox and any trigger."""
    has_wait = any(one.opcode == WAIT for one in kernel.body)
    assert has_wait == pdl, f"{kernel.name} {'has' if has_wait else 'lacks'} {WAIT}"
    if not pdl:
        assert all(one.opcode != TRIGGER for one in kernel.body), f"{TRIGGER} without programmatic launch"
        return
    waits = [one.opcode == WAIT and not one.predicate for one in kernel.body]
    waited = kernel.flow(False, True, lambda index, before: before or waits[index], operator.and_)
    for index, one, origins in kernel.accesses(roles):
        assert waited[index] or not origins & POINTERS, f"`{one}` can run before {WAIT}"
    for index, one in enumerate(kernel.body):
        assert waited[index] or one.opcode != TRIGGER, f"{TRIGGER} can run before {WAIT}"


def check_release_before_trigger(kernel: Kernel) -> None:
    """R1 (ii): a fence stands between any store and a trigger or the exit, and no store follows a trigger.

    The fence is the thread's own, or, at the exit, that of another thread of the CTA behind a barrier that both
    passed: a fence covers what the barrier has put before it (PTX 8.10, causality order is transitive).
    """
    fences = [bool(_FENCE.fullmatch(one.opcode)) and not one.predicate for one in kernel.body]

    def pending_after(index: int, before: frozenset[int]) -> frozenset[int]:
        """Stores that no fence follows yet, or the barriers behind them."""
        one = kernel.body[index]
        if fences[index]:
            return frozenset()
        if before and _BARRIER.match(one.opcode) and not one.predicate:
            return frozenset({index})
        return before | {index} if one.stores else before

    pending = kernel.flow(frozenset(), frozenset(), pending_after, frozenset.union)
    triggers = [one.opcode == TRIGGER for one in kernel.body]
    triggered = kernel.flow(False, False, lambda index, before: before or triggers[index], operator.or_)
    for index, one in enumerate(kernel.body):
        assert not (one.stores and triggered[index]), f"`{one}` can follow {TRIGGER}"
        if not triggers[index] and one.opcode not in {"ret", "exit"}:
            continue
        for earlier in sorted(pending[index]):
            covered = _BARRIER.match(kernel.body[earlier].opcode) and _fence_follows(kernel, earlier, fences)
            if triggers[index] or not covered:
                raise AssertionError(f"`{one}` can follow `{kernel.body[earlier]}` with no fence between")


def _fence_follows(kernel: Kernel, barrier: int, fences: Sequence[bool]) -> bool:
    """Whether some path from the barrier comes to a fence before any trigger or further barrier."""
    seen: set[int] = set()
    todo = kernel.successors(barrier)
    while todo:
        index = todo.pop()
        one = kernel.body[index]
        if fences[index]:
            return True
        if index not in seen and one.opcode != TRIGGER and not _BARRIER.match(one.opcode):
            seen.add(index)
            todo.extend(kernel.successors(index))
    return False


def check_no_trap(kernel: Kernel) -> None:
    """R10: a kernel ends, it never traps: the CUDA context has to survive."""
    for one in kernel.body:
        assert one.opcode.split(".")[0] not in {"trap", "brkpt"}, f"{kernel.name} traps"


def check_no_local_memory(sass: str) -> None:
    """No loads or stores of local memory: nothing spilled, no array that is indexed at run time."""
    found = [line.strip() for line in sass.splitlines() if _LOCAL.search(line)]
    assert not found, f"{len(found)} accesses to local memory, first: {found[0]}"
    assert re.search(r"\bEXIT\b", sass), "this is not SASS of a kernel"
