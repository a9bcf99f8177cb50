# SPDX-License-Identifier: Apache-2.0
"""After a fault between processes: the ranks come together again, or go on without the one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist

from nvcomm.communicator import Communicator
from nvcomm.errors import GroupError
from nvcomm.group import StoreGroup
from stress.faults.common import EVERY_RANK
from stress.faults.host_scene import LIMIT_S, Scene
from stress.faults.table import AS_BEFORE, MORE_WORDS, NEW_GROUP, ODD_RANK, RESET

RESET_S = 5.0  # how long survivors wait for a rank that is gone, once they have met


def go_on(scene: Scene) -> tuple[str, str]:
    """Brings the ranks together, compares `MORE_WORDS` words, audits; what had to be done, and what was wrong."""
    comm, group = scene.comm, scene.group
    audit = comm.audit()
    places = group.exchange("place", [str(comm.engine.fault() or ""), asdict(audit)], LIMIT_S)
    healthy = all(place == ["", asdict(audit)] for place in places) and not audit.dirty_words
    if not healthy:
        comm.reset()
    return (AS_BEFORE if healthy else RESET), _more_words(comm, group)


def go_on_without(scene: Scene, store: dist.Store) -> tuple[str, str]:
    """A rank is gone: `reset()` has to say so, and the others go on."""
    survivors = [rank for rank in EVERY_RANK if rank != ODD_RANK]
    group = StoreGroup(store, survivors.index(scene.comm.rank), len(survivors), "survivors")
    group.barrier("a rank is gone", LIMIT_S)
    scene.port.timeout_s = RESET_S / 2  # reset() waits twice as long
    try:
        scene.comm.reset()
    except GroupError as error:
        if error.missing != (ODD_RANK,):
            return "", f"reset() misses {error.missing}"
    else:
        return "", "reset() succeeded without a rank"
    with Communicator(group, "cpu", timeout_s=LIMIT_S) as comm:
        return NEW_GROUP, _more_words(comm, group)


def _more_words(comm: Communicator, group: StoreGroup) -> str:
    compared = 0
    for call, size in enumerate(_sizes()):
        index = torch.arange(size, dtype=torch.int32)
        want = torch.stack([index * 8 + rank + (call << 24) for rank in range(comm.world_size)])
        if wrong := int((comm.all_gather(want[comm.rank].clone()) != want).sum()):
            return f"{wrong} wrong words in gather {call} afterwards"
        compared += want.numel()
        if compared >= MORE_WORDS:
            break
    group.barrier("after", LIMIT_S)
    mine = asdict(comm.audit())
    audits = group.exchange("audit", mine, LIMIT_S)
    clean = all(audit == mine for audit in audits) and not mine["dirty_words"]
    return "" if clean else f"mailboxes afterwards: {audits}"


def _sizes() -> Iterator[int]:
    while True:
        yield from (4096, 60_000, 1, 1 << 17)
