# SPDX-License-Identifier: Apache-2.0
"""A group over a key-value store: one exchange after the other, in the same order on every rank.

Exchange number k of rank r is the key `prefix/k/r`, so repeated exchanges never mix, whatever their tags; the tag
travels with the value, and ranks that are at different places of the program learn it at once. The last rank to have
read exchange k deletes its keys.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist

from nvcomm.errors import GroupError, UsageError
from nvcomm.group.contract import JSON
from nvcomm.group.envelope import check_place, decode, encode, other_worlds
from nvcomm.group.pauses import pauses


class StoreGroup:
    """A group over a `torch.distributed.Store`.

    Args:
        store: shared by all ranks; the group keeps it alive, and writes below `prefix` only.
        rank: this rank.
        world_size: number of ranks.
        prefix: names the group in the store; no other group may ever have used it there.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a group of {world_size} ranks: wanted 0 to {world_size - 1}.")
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = prefix
        self._sequence = 0

    def exchange(self, tag: str, value: JSON, timeout_s: float) -> list[JSON]:
        """See `Group.exchange`."""
        deadline = time.monotonic() + timeout_s
        sequence = self._sequence
        self._sequence += 1
        envelope: dict[str, JSON] = {"tag": tag, "world_size": self.world_size}
        try:
            text = encode(envelope | {"value": value})
        except UsageError as error:
            self._set(sequence, encode(envelope | {"error": str(error)}))
            raise
        self._set(sequence, text)
        answers = self._collect(sequence, tag, deadline)
        self._forget(sequence)
        return answers

    def barrier(self, tag: str, timeout_s: float) -> None:
        """See `Group.barrier`."""
        self.exchange(tag, None, timeout_s)

    def child_store(self, name: str) -> dist.Store:
        """The group's store for somebody else's keys, apart from the group's own. `name`: never used in it before."""
        return dist.PrefixStore(f"{self._prefix}/{name}", self._store)

    def _key(self, sequence: int, name: object) -> str:
        return f"{self._prefix}/{sequence}/{name}"

    def _set(self, sequence: int, text: str) -> None:
        try:
            self._store.set(self._key(sequence, self.rank), text)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} cannot write to the group's store: {error}") from error

    def _collect(self, sequence: int, tag: str, deadline: float) -> list[JSON]:
        """Reads the envelopes of exchange `sequence` until all ranks, by their own count, have written theirs."""
        seen: dict[int, dict[str, Any]] = {}
        count = self.world_size
        for pause in pauses():
            for rank in range(count):
                if rank not in seen and (envelope := self._read(sequence, rank)) is not None:
                    seen[rank] = envelope
                    check_place(envelope, rank, tag, self.rank)
            count = max([count, *(envelope["world_size"] for envelope in seen.values())])
            if len(seen) == count or time.monotonic() >= deadline:
                break
            time.sleep(pause)
        sizes = {rank: envelope["world_size"] for rank, envelope in sorted(seen.items())}
        if len(set(sizes.values())) > 1:
            raise other_worlds({rank: sizes.get(rank, "no answer") for rank in range(count)})
        missing = tuple(sorted(set(range(count)) - set(seen)))
        if missing:
            raise GroupError(
                f"rank {self.rank} waited at {tag!r} for rank {', '.join(map(str, missing))} of {count}, in vain: "
                f"find out whether it runs and makes the same calls, or wait longer.",
                missing,
            )
        return [seen[rank]["value"] for rank in range(count)]

    def _read(self, sequence: int, rank: int) -> dict[str, Any] | None:
        key = self._key(sequence, rank)
        try:
            if not self._store.check([key]):
                return None
            data = self._store.get(key)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} cannot read from the group's store: {error}", (rank,)) from error
        return decode(data, rank)

    def _forget(self, sequence: int) -> None:
        """The last reader deletes the exchange. Every rank has answered by now, so a store that fails here has lost
        the process that served it after the exchange: no harm to it."""
        with contextlib.suppress(RuntimeError):
            if self._store.add(self._key(sequence, "read"), 1) == self.world_size:
                for name in (*range(self.world_size), "read"):
                    self._store.delete_key(self._key(sequence, name))


def local_groups(world_size: int) -> list[StoreGroup]:
    """One group whose ranks are threads of this process; element r is for rank r."""
    store = dist.HashStore()
    return [StoreGroup(store, rank, world_size, "nvcomm/local") for rank in range(world_size)]


def fresh_group(store: dist.Store, rank: int, world_size: int) -> StoreGroup:
    """A group under a prefix that none has used in `store`: each rank counts its own, in the same order everywhere."""
    return StoreGroup(store, rank, world_size, f"nvcomm/{store.add(f'nvcomm/groups/{rank}', 1)}")
