# SPDX-License-Identifier: Apache-2.0
"""The mailboxes after a run: every word EMPTY, every rank at the same slot and generation, or the run has failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def compare_audits(audits: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """What is wrong, one text each.

    Args:
        audits: for each rank `slot`, `generation` and `dirty_words`, as `nvcomm.stats.Audit` has them.
    """
    for rank, audit in enumerate(audits):
        if audit["dirty_words"]:
            yield f"{audit['dirty_words']} words in the mailbox of rank {rank} are not EMPTY"
    for name in ("slot", "generation"):
        values = [audit[name] for audit in audits]
        if len(set(values)) > 1:
            yield f"ranks ended at different {name}s: {values}"
