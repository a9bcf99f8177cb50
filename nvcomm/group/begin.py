# SPDX-License-Identifier: Apache-2.0
"""How a group begins: its store is reached, and a prefix taken that no group has used there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from nvcomm.bounded_call import BoundedCall
from nvcomm.errors import GroupError
from nvcomm.group.exchange import LAST_LOOK_S
from nvcomm.group.file_store import never_destroy, why_stuck
from nvcomm.group.store_group import StoreGroup

T = TypeVar("T")


def reached(connect: Callable[[], T], where: str, timeout_s: float) -> T:
    """What `connect` returns: torch's timeout does not see a server that takes the connection and then stands still.

    Raises:
        GroupError: it did not answer within `timeout_s`; `where` names it. Else what `connect` raises.
    """
    call = BoundedCall(connect, "nvcomm-connect")
    if not call.ended(timeout_s + LAST_LOOK_S):
        raise GroupError(
            f"{where} does not answer: find out whether the process that serves it was started, and whether it stands "
            "still. It is rank 0, or torchrun's agent."
        )
    return call.result()


def fresh_group(store: dist.Store, rank: int, world_size: int, timeout_s: float, *, serves: bool = False) -> StoreGroup:
    """A group under a prefix that none has used in `store`: each rank counts its own, in the same order everywhere.

    Raises:
        GroupError: the store fails, or does not answer within `timeout_s`.
    """
    call = BoundedCall(lambda: store.add(f"nvcomm/groups/{rank}", 1), "nvcomm-group")
    if not call.ended(timeout_s + LAST_LOOK_S):
        raise GroupError(f"rank {rank} waited for the group's store in vain. {why_stuck(store)}")
    try:
        return StoreGroup(store, rank, world_size, f"nvcomm/{call.result()}", serves=serves)
    except RuntimeError as error:
        never_destroy(store)
        raise GroupError(f"rank {rank} cannot use the group's store: {error}") from error
