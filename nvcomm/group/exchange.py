# SPDX-License-Identifier: Apache-2.0
"""One exchange over a key-value store: each rank writes a key, and reads all the others' until a deadline.

The store's calls are torch's, in C++, and any of them may never return: a FileStore whose file was cut off, a TCPStore
whose server was stopped. So `run` is for a thread that can be left behind; what it has found is open to look at.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from nvcomm.errors import GroupError, UsageError
from nvcomm.group.contract import JSON
from nvcomm.group.envelope import check_place, decode, encode, other_worlds
from nvcomm.group.file_store import never_destroy, why_stuck
from nvcomm.group.pauses import pauses

# What a store that answers may take, past the deadline, for the last look at every rank's key.
LAST_LOOK_S = 0.5
# What ranks that look every few milliseconds may take to have read the last answer, on a busy machine.
_READERS_S = 10.0


class Exchange:
    """One rank's part of an exchange.

    Args:
        store: of all ranks.
        prefix: of this exchange's keys, which no other one has.
        rank: this rank.
        world_size: number of ranks.
        tag: what the exchange is about.
        serves: whether this rank has to stay until all have read, as the store goes with it.

    Attributes:
        answers: what every rank told, by rank, once that is known.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world_size: int, tag: str, serves: bool) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._tag = tag
        self._serves = serves
        self._seen: dict[int, dict[str, Any]] = {}
        self.answers: list[JSON] | None = None

    def run(self, value: JSON, deadline: float) -> list[JSON]:
        """Tells `value` and returns what every rank told; see `Group.exchange`. `deadline`: of the monotonic clock."""
        envelope: dict[str, JSON] = {"tag": self._tag, "world_size": self._world_size}
        try:
            text = encode(envelope | {"value": value})
        except UsageError as error:
            self._set(encode(envelope | {"error": str(error)}))
            raise
        self._set(text)
        self.answers = self._collect(deadline)
        self._forget(min(deadline, time.monotonic() + _READERS_S))
        return self.answers

    def stuck(self) -> GroupError:
        """The error of a rank that waited for `run` in vain: the store is at fault, whoever else may be."""
        return self._store_failed("a call of the group's store does not return")

    def _store_failed(self, what: str) -> GroupError:
        """The error where the store is at fault. Who had not answered by then is missing; one of them may serve it."""
        missing = tuple(rank for rank in self._missing() if rank != self._rank)
        others = f" for {_named(missing)} of {self._count()}" if missing else ""
        return GroupError(
            f"rank {self._rank} waited at {self._tag!r}{others}, in vain: {what}. {why_stuck(self._store)}", missing
        )

    def _count(self) -> int:
        """The number of ranks, by the largest count of those that have answered."""
        return max([self._world_size, *(envelope["world_size"] for envelope in self._seen.copy().values())])

    def _missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._count()) if rank not in self._seen)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _set(self, text: str) -> None:
        try:
            self._store.set(self._key(self._rank), text)
        except RuntimeError as error:
            never_destroy(self._store)
            raise GroupError(
                f"rank {self._rank} cannot write to the group's store: {error}. {why_stuck(self._store)}"
            ) from error

    def _collect(self, deadline: float) -> list[JSON]:
        """Reads envelopes until all ranks, by their own count, have written theirs."""
        for pause in pauses():
            for rank in range(self._count()):
                if rank not in self._seen and (envelope := self._read(rank)) is not None:
                    self._seen[rank] = envelope
                    check_place(envelope, rank, self._tag, self._rank)
            if len(self._seen) == self._count() or time.monotonic() >= deadline:
                break
            time.sleep(pause)
        count = self._count()
        sizes = {rank: envelope["world_size"] for rank, envelope in sorted(self._seen.items())}
        if len(set(sizes.values())) > 1:
            raise other_worlds({rank: sizes.get(rank, "no answer") for rank in range(count)})
        if missing := self._missing():
            raise GroupError(
                f"rank {self._rank} waited at {self._tag!r} for {_named(missing)} of {count}, in vain: "
                f"find out whether it runs and makes the same calls, or wait longer.",
                missing,
            )
        return [self._seen[rank]["value"] for rank in range(count)]

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = self._key(rank)
        try:
            if not self._store.check([key]):
                return None
            data = self._store.get(key)
        except RuntimeError as error:
            never_destroy(self._store)
            raise self._store_failed(f"it cannot read from the group's store: {error}") from error
        return decode(data, rank)

    def _forget(self, deadline: float) -> None:
        """The last reader deletes the exchange. Every rank has answered by now, so a store that fails here has lost
        the process that served it after the exchange: no harm to it."""
        try:
            if self._store.add(self._key("read"), 1) == self._world_size:
                for name in (*range(self._world_size), "read"):
                    self._store.delete_key(self._key(name))
                return
            for pause in pauses():
                if not self._serves or time.monotonic() >= deadline or not self._store.check([self._key("read")]):
                    return
                time.sleep(pause)
        except RuntimeError:
            never_destroy(self._store)


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
