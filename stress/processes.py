# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run on GPUs agree on its end and tell each other what they saw: one alone, or one a rank."""

from __future__ import annotations

from nvcomm import group as groups
from nvcomm.errors import GroupError
from stress.gpu_facts import Facts
from stress.watchdog import GRACE_S

# Processes begin and end a run within so many seconds of each other: one may have waited out its timeout meanwhile.
MEET_S = 60.0


class Alone:
    """All ranks are here: nobody else has to be asked."""

    def agree(self, stop: bool) -> bool:
        """Whether to stop."""
        return stop

    def gather(self, facts: Facts) -> list[Facts]:
        """Every process's facts."""
        return [facts]


class Others:
    """The other processes of a peer world; every process calls the same, in the same order.

    Args:
        group: all processes. It is not used beyond the start: ranks that leave a run at different places would be at
            different exchanges of it for ever. Each run has a group of its own, and another for its end.
        name: of the run.
        timeout_s: the run's.
    """

    def __init__(self, group: groups.StoreGroup, name: str, timeout_s: float) -> None:
        def child(part: str) -> groups.StoreGroup:
            store = group.child_store(f"stress/{name}/{part}")
            return groups.StoreGroup(store, group.rank, group.world_size, "group")

        self.group = child("run")
        self._end = child("end")
        self._agree_s = timeout_s + GRACE_S / 2
        self.group.barrier("stress/begin", MEET_S)

    def agree(self, stop: bool) -> bool:
        """Whether any process wants to stop."""
        return any(self.group.exchange("stress/stop", stop, self._agree_s))

    def gather(self, facts: Facts) -> list[Facts]:
        """The facts of every process; of this one alone, and a reason, where another is gone."""
        try:
            return self._end.exchange("stress/facts", facts, MEET_S)  # type: ignore[return-value]
        except GroupError as error:
            return [facts | {"reason": facts["reason"] or str(error)}]
