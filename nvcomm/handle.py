# SPDX-License-Identifier: Apache-2.0
"""What every mailbox kernel is told besides its work: where its rank's mailboxes are, and what the call says of itself.

Named tuples: of numbers on the host, where an engine packs them; of DSL values inside a kernel. One by one and in this
order the fields are the GPU function's parameters.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, get_type_hints

from cutlass import Int32, Int64, Uint32

Named = TypeVar("Named", bound=NamedTuple)


class Handle(NamedTuple):
    """A rank's mailboxes and state: the same in every call of a communicator.

    Attributes:
        peers: every rank's mailbox, this rank's first, then the following ranks' in turn, so that the ranks'
            stores spread over the destinations.
        multicast_ptr: one address for all mailboxes, or 0.
        state: this rank's state block.
        fault_record: pinned host memory for what a timeout saw.
        timeout_ns: bound of every wait, in nanoseconds.
        rank: this rank.
    """

    peers: list[Int64]
    multicast_ptr: Int64
    state: Int64
    fault_record: Int64
    timeout_ns: Int64
    rank: Int32


class Call(NamedTuple):
    """What a launch says of itself, frozen into a captured graph; read with device checks only.

    Attributes:
        site: not 0, and different for every launch or captured node.
        kind: index of the operation, and of the dtype in the upper half.
        tag: the caller's own mark, 16 bits.
    """

    site: Uint32
    kind: Uint32
    tag: Uint32


def placeholder(kind: type[Named]) -> Named:
    """A named tuple of DSL numbers, to compile with."""
    return kind(*(number(0) for number in get_type_hints(kind).values()))


def handle_placeholder(world_size: int) -> Handle:
    """A handle of so many ranks, to compile with."""
    return Handle([Int64(0)] * world_size, Int64(0), Int64(0), Int64(0), Int64(0), Int32(0))
