# SPDX-License-Identifier: Apache-2.0
"""The audit of a stress run: what ledgers, launches and mailboxes count for themselves has to agree."""

from __future__ import annotations

import pytest

from nvcomm.mailbox import NUM_SLOTS
from stress.audit import audit_ranks
from stress.run import FIRST_GENERATION

RANKS, REPLAYS = 3, 500  # 1,500 collectives: the generation wraps
COLLECTIVES = 3 * REPLAYS
END = {"slot": COLLECTIVES % NUM_SLOTS, "generation": (FIRST_GENERATION + COLLECTIVES) % (1 << 32), "dirty_words": 0}


def audit(launched: int | None = REPLAYS, **changes) -> list[str]:
    """Of right counts, of which `changes` are the last rank's."""
    last = {"replays": REPLAYS, "gathers": COLLECTIVES, **END} | changes
    mailboxes = [END] * (RANKS - 1) + [{name: last[name] for name in END}]
    replays, gathers = [REPLAYS] * (RANKS - 1) + [last["replays"]], [COLLECTIVES] * (RANKS - 1) + [last["gathers"]]
    return list(audit_ranks(RANKS, replays, gathers, mailboxes, launched))


@pytest.mark.parametrize("launched", [REPLAYS, None])
def test_right_counts_pass(launched):
    assert END["generation"] < COLLECTIVES
    assert audit(launched) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"replays": REPLAYS - 1}, "launched 500 replays, but rank 2 counts 499"),
        ({"gathers": COLLECTIVES - 1}, "rank 2 compared 1499 collectives; 500 replays have 1500"),
        ({"gathers": COLLECTIVES + 3}, "rank 2 compared 1503 collectives; 500 replays have 1500"),
        ({"dirty_words": 2}, "2 words in the mailbox of rank 2 are not EMPTY"),
        ({"slot": END["slot"] + 1}, "rank 2 ended at slot 1; 1500 collectives end at 0"),
        ({"generation": END["generation"] - 1}, "rank 2 ended at generation 498; 1500 collectives end at 499"),
    ],
)
@pytest.mark.parametrize("launched", [REPLAYS, None])
def test_one_wrong_count_of_the_last_rank_is_named(changes, text, launched):
    assert audit(launched, **changes) == [text]


def test_a_rank_with_more_replays_than_were_launched_is_named():
    assert "launched 500 replays, but rank 2 counts 501" in audit(replays=REPLAYS + 1, gathers=COLLECTIVES + 3)


def test_a_rank_that_did_not_tell_is_missed():
    problems = list(audit_ranks(RANKS, [REPLAYS] * 2, [COLLECTIVES] * 2, [END] * 2, REPLAYS))
    assert len(problems) == 3
    assert problems[0] == "2 ranks told of their replays, and there are 3"


def test_collectives_that_touched_no_mailbox_fail_though_all_ranks_agree():
    still = END | {"slot": 0, "generation": FIRST_GENERATION}
    problems = list(audit_ranks(RANKS, [REPLAYS] * RANKS, [COLLECTIVES] * RANKS, [still] * RANKS, REPLAYS))
    assert len(problems) == RANKS
