# SPDX-License-Identifier: Apache-2.0
"""How one rank's bytes reach the others: every world gives its ranks a `Memory`.

Who owns what: a `Memory` owns the rank's own mailbox and its mappings of the other ranks' mailboxes, nothing else. It
does not know what lies in them (`nvcomm.mailbox` does), starts no transfer and waits for nobody once it exists. Whoever
built it closes it, after the last kernel, thread or view that uses one of its addresses has ended; closing is local,
and a peer's mapping of this rank's mailbox stays good until that peer closes its own.
"""

from __future__ import annotations

from typing import Literal, Protocol, Self, runtime_checkable

World = Literal["host", "virtual", "peer"]


@runtime_checkable
class Memory(Protocol):
    """Every rank's mailbox, as one rank sees it.

    Attributes:
        world: "host" (processes or threads on CPUs), "virtual" (streams on one GPU) or "peer" (a process per rank).
        rank: this rank.
        world_size: number of ranks.
        size_bytes: bytes of one mailbox, the same on every rank.
        peer_ptrs: address of every rank's mailbox as seen from this rank, indexed by rank, its own included.
        multicast_ptr: one address whose stores reach every mailbox; 0 where there is none.
    """

    @property
    def world(self) -> World: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def peer_ptrs(self) -> tuple[int, ...]: ...

    @property
    def multicast_ptr(self) -> int: ...

    def close(self) -> None:
        """Gives the memory back. Local, and harmless when called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
