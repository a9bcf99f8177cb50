# SPDX-License-Identifier: Apache-2.0
"""After a run: what ranks counted agrees with what was launched and with their mailboxes, whose words are all EMPTY.

Ledger, launches and mailboxes count for themselves. A rank whose ledger was not read, a replay that was not checked, a
collective that touched no mailbox: each shows as a difference, and the run has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nvcomm.mailbox import GENERATION_MASK, NUM_SLOTS
from stress.oracle import GATHERS_PER_REPLAY
from stress.run import FIRST_GENERATION


def audit_ranks(
    ranks: int,
    replays: Sequence[int],
    gathers: Sequence[int],
    mailboxes: Sequence[Mapping[str, int]],
    launched: int | None = None,
) -> Iterator[str]:
    """What is wrong, one text each.

    Args:
        ranks: world size.
        replays, gathers: for each rank the replays it finished and the collectives it compared.
        mailboxes: for each rank `slot`, `generation` and `dirty_words`, as `nvcomm.stats.Audit` has them.
        launched: the replays that there should be, or None: as many as the rank with the most has.
    """
    for counts, what in ((replays, "replays"), (gathers, "collectives"), (mailboxes, "mailboxes")):
        if len(counts) != ranks:
            yield f"{len(counts)} ranks told of their {what}, and there are {ranks}"
    wanted = max(replays, default=0) if launched is None else launched
    for rank, count in enumerate(replays):
        if count != wanted:
            yield f"launched {wanted} replays, but rank {rank} counts {count}"
    collectives = wanted * GATHERS_PER_REPLAY
    for rank, count in enumerate(gathers):
        if count != collectives:
            yield f"rank {rank} compared {count} collectives; {wanted} replays have {collectives}"
    want = {"slot": collectives % NUM_SLOTS, "generation": (FIRST_GENERATION + collectives) & GENERATION_MASK}
    for rank, mailbox in enumerate(mailboxes):
        if mailbox["dirty_words"]:
            yield f"{mailbox['dirty_words']} words in the mailbox of rank {rank} are not EMPTY"
        for name, value in want.items():
            if mailbox[name] != value:
                yield f"rank {rank} ended at {name} {mailbox[name]}; {collectives} collectives end at {value}"
