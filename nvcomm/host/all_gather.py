# SPDX-License-Identifier: Apache-2.0
"""All-gather between CPU ranks, bit for bit.

A call publishes its payload into row `rank` of the slot in every mailbox, the own one last, then collects block after
block of every row as it arrives, its own row included (R2), and clears each block once it has been handed on (R3).
"""

from __future__ import annotations

from nvcomm.errors import NvcommError
from nvcomm.host import headers
from nvcomm.host.steps import FILL, Row, Steps
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Bytes, Words


def all_gather(steps: Steps, payload: Bytes, out: Bytes, call: headers.Call) -> None:
    """Gathers `payload` of every rank.

    Args:
        steps: of this rank.
        payload: (num_bytes,), at most the layout's `max_bytes`.
        out: (world_size, num_bytes), overwritten.
        call: what is called, for R11.

    Raises:
        PeerTimeoutError: a rank did not publish (R10). What it did not send is 0xFF in `out`.
        CollectiveMismatchError: ranks call different things (R11). `out` is 0xFF.
    """
    if not len(payload) and not steps.checks:
        steps.empty_call()
        return
    port = steps.port
    words = steps.pad(payload)
    waiting = Waiting(steps.timeout_s())
    publish(steps, words, call)
    try:
        steps.compare_headers(call, waiting)
    except NvcommError:
        out[...] = FILL
        raise
    records = port.own.records[port.slot]
    rows = [Row(r, steps.row_words(port.own, r, len(words)), out[r], records[r]) for r in steps.sources()]
    steps.collect(rows, waiting)
    steps.finish(payload, out)
    steps.advance(len(payload))


def publish(steps: Steps, words: Words, call: headers.Call) -> None:
    """Stores the payload into row `rank` of every mailbox, with what it takes to restore it (R5)."""
    port = steps.port
    sent, runs, num_escapes = steps.escape(words)
    port.counts.escapes += num_escapes
    steps.begin(call)
    for dst_rank in steps.destinations():
        mailbox = port.mailboxes[dst_rank]
        steps.send(dst_rank, steps.row_words(mailbox, port.rank, len(sent)), sent)
        for first, records in runs:
            target = mailbox.records[port.slot][port.rank][first : first + len(records)]
            steps.send(dst_rank, target.reshape(-1), records.reshape(-1))
