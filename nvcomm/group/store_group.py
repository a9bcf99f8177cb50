# SPDX-License-Identifier: Apache-2.0
"""A group over a key-value store: one exchange after the other, in the same order on every rank.

Exchange number k of rank r is the key `prefix/k/r`, so repeated exchanges never mix, whatever their tags; the tag
travels with the value, and ranks that are at different places of the program learn it at once. The last rank to have
read exchange k deletes its keys.

Each exchange runs on a daemon thread, so that it ends by its deadline even where a call of the store never returns.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from nvcomm.bounded_call import BoundedCall
from nvcomm.errors import UsageError
from nvcomm.group.contract import JSON
from nvcomm.group.exchange import LAST_LOOK_S, Exchange

# What an exchange that outlived its deadline is given to end before the next one: a busy machine holds a thread up.
_GRACE_S = 5.0


class StoreGroup:
    """A group over a `torch.distributed.Store`.

    Args:
        store: shared by all ranks; the group keeps it alive, and writes below `prefix` only.
        rank: this rank.
        world_size: number of ranks.
        prefix: names the group in the store; no other group may ever have used it there.
        serves: whether the store ends with this rank, which then leaves no exchange before all have read it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str, *, serves: bool = False) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a group of {world_size} ranks: wanted 0 to {world_size - 1}.")
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = prefix
        self._serves = serves
        self._sequence = 0
        self._under_way: tuple[Exchange, BoundedCall[list[JSON]]] | None = None

    def exchange(self, tag: str, value: JSON, timeout_s: float) -> list[JSON]:
        """See `Group.exchange`. Where a call of the store does not return, up to half a second late."""
        deadline = time.monotonic() + timeout_s
        if self._under_way is not None:
            earlier, call = self._under_way
            if not call.ended(min(timeout_s, _GRACE_S)):
                raise earlier.stuck()
        prefix = f"{self._prefix}/{self._sequence}"
        self._sequence += 1
        exchange = Exchange(self._store, prefix, self.rank, self.world_size, tag, self._serves)
        call = BoundedCall(lambda: exchange.run(value, deadline), "nvcomm-exchange")
        self._under_way = exchange, call
        if not call.ended(deadline - time.monotonic() + LAST_LOOK_S):
            if exchange.answers is None:
                raise exchange.stuck()
            return exchange.answers
        self._under_way = None
        return call.result()

    def barrier(self, tag: str, timeout_s: float) -> None:
        """See `Group.barrier`."""
        self.exchange(tag, None, timeout_s)

    def child_store(self, name: str) -> dist.Store:
        """The group's store for somebody else's keys, apart from the group's own. `name`: never used in it before."""
        return dist.PrefixStore(f"{self._prefix}/{name}", self._store)


def local_groups(world_size: int) -> list[StoreGroup]:
    """One group whose ranks are threads of this process; element r is for rank r."""
    store = dist.HashStore()
    return [StoreGroup(store, rank, world_size, "nvcomm/local") for rank in range(world_size)]
