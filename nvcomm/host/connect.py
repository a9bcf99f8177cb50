# SPDX-License-Identifier: Apache-2.0
"""From a group to working ranks: what they must agree on, their memory, their engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvcomm.capability import Requirement, check
from nvcomm.env import settings
from nvcomm.errors import UnsupportedError, UsageError
from nvcomm.group import Group, local_groups
from nvcomm.host.engine import HostEngine
from nvcomm.mailbox import EMPTY, LAYOUT_VERSION, MailboxLayout
from nvcomm.memory.host import HostMemory, connect, local_memories
from nvcomm.memory.room import too_little


def open_memory(
    group: Group, max_bytes: int, timeout_s: float, config: Mapping[str, Any] | None = None
) -> tuple[HostMemory, MailboxLayout]:
    """Mailboxes in shared memory for the processes of one host. Collective.

    Args:
        group: the ranks.
        max_bytes: most bytes that a rank contributes to a call.
        timeout_s: bound of the wait for the others.
        config: what else has to be equal on all ranks: name -> value.

    Raises:
        CapabilityError: ranks differ in world size, `max_bytes`, `config`, layout, checks or versions of packages, or
            the host has no room, or the memory could not be set up on a rank; the same text on every rank.
        GroupError: a rank did not answer within `timeout_s`.
    """
    layout = _layout(group.world_size, max_bytes)
    ours: dict[str, Any] = {
        "max_bytes": max_bytes,
        "mailbox layout version": LAYOUT_VERSION,
        "mailbox size in bytes": layout.size_bytes,
        "NVCOMM_DEVICE_CHECKS": settings().device_checks,
        **(config or {}),
    }
    # Looked at before any rank takes its share.
    room = Requirement("memory", "device", "rank", lambda: too_little(group.world_size * layout.size_bytes))
    check([room], group, timeout_s, config=ours)
    memory = connect(group, layout.size_bytes, armed_bytes=layout.faults_base, armed_word=EMPTY, timeout_s=timeout_s)
    return memory, layout


def local_engines(world_size: int, max_bytes: int, *, timeout_s: float = 30.0, **options: Any) -> list[HostEngine]:
    """Engines whose ranks are threads of this process; element r is for rank r. `options` are `HostEngine`'s.

    Raises:
        UnsupportedError: the host has no room for their mailboxes.
    """
    layout = _layout(world_size, max_bytes)
    if reason := too_little(world_size * layout.size_bytes):
        raise UnsupportedError(reason)
    memories = local_memories(world_size, layout.size_bytes, armed_bytes=layout.faults_base, armed_word=EMPTY)
    return [
        HostEngine(memory, layout, group, timeout_s=timeout_s, **options)
        for memory, group in zip(memories, local_groups(world_size), strict=True)
    ]


def _layout(world_size: int, max_bytes: int) -> MailboxLayout:
    if max_bytes < 1:
        raise UsageError(f"max_bytes is {max_bytes}; wanted at least 1.")
    return MailboxLayout(world_size, max_bytes)
