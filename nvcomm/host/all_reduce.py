# SPDX-License-Identifier: Apache-2.0
"""All-reduce between CPU ranks: LL and two-shot, the same bits on every rank and for both (docs/mailbox.md R13).

LL: every rank publishes its contribution to all, and each sums all. Two-shot, in one generation (R12): chunk i belongs
to one rank, its owner. Contributions go to row r, place i, of the owner's mailbox; the owner sums them with its own,
which stays in registers, and publishes the result to row owner(i), place i, of every mailbox, its own included.
Everybody waits for every owner, and an owner has waited for everybody.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nvcomm.errors import NvcommError, UsageError
from nvcomm.host import headers
from nvcomm.host.reduce import part, sum_of, without_reserved
from nvcomm.host.steps import FILL, Row, Steps
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Bytes, Words, full_barrier
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, WORD_BYTES

# Above this two-shot moves enough less to pay for its second wait.
AUTO_LL_BYTES = 64 << 10
Reduce = Callable[[Steps, Words, Bytes, headers.Call, torch.dtype, Waiting], None]


def choose(protocol: str, num_bytes: int, world_size: int) -> str:
    """The protocol that `protocol` stands for: "ll" or "two_shot".

    Raises:
        UsageError: there is no such protocol.
    """
    if not isinstance(protocol, str) or protocol not in _PROTOCOLS:
        if protocol != "auto":
            raise UsageError(f"protocol is {protocol!r}; wanted 'auto', 'll' or 'two_shot'.")
        return "ll" if world_size <= 2 or num_bytes <= AUTO_LL_BYTES else "two_shot"
    return protocol


def all_reduce(steps: Steps, payload: Bytes, out: Bytes, call: headers.Call, dtype: torch.dtype, protocol: str) -> None:
    """Sums `payload` of every rank.

    Args:
        steps: of this rank.
        payload: (num_bytes,), whole elements, at most the layout's `max_bytes`.
        out: (num_bytes,), overwritten.
        call: what is called, for R11.
        dtype: of the elements.
        protocol: "ll" or "two_shot".

    Raises:
        PeerTimeoutError, CollectiveMismatchError: as `all_gather`; `out` is 0xFF.
    """
    if not len(payload) and not steps.checks:
        steps.empty_call()
        return
    words = without_reserved(steps.pad(payload))
    try:
        _PROTOCOLS[protocol](steps, words, out, call, dtype, Waiting(steps.timeout_s()))
    except NvcommError:
        out[...] = FILL
        raise
    steps.advance(len(payload))


def ll(steps: Steps, words: Words, out: Bytes, call: headers.Call, dtype: torch.dtype, waiting: Waiting) -> None:
    """One wait; every rank sums everything."""
    port = steps.port
    steps.begin(call)
    for dst_rank in steps.destinations():
        steps.send(dst_rank, steps.row_words(port.mailboxes[dst_rank], port.rank, len(words)), words)
    steps.compare_headers(call, waiting)
    contributions = np.empty((port.world_size, len(words) * WORD_BYTES), np.uint8)
    rows = [Row(r, steps.row_words(port.own, r, len(words)), contributions[r]) for r in steps.sources()]
    steps.collect(rows, waiting)
    out[:] = sum_of(contributions, dtype)[: len(out)]


def two_shot(steps: Steps, words: Words, out: Bytes, call: headers.Call, dtype: torch.dtype, waiting: Waiting) -> None:
    """Two waits; every rank sums its own chunks."""
    port = steps.port
    owned = [_owned(len(words), rank, port.world_size) for rank in range(port.world_size)]
    steps.begin(call)
    for owner in steps.destinations():
        if owner != port.rank:
            target = steps.row_words(port.mailboxes[owner], port.rank, len(words))
            steps.send(owner, target[owned[owner]], words[owned[owner]])
    steps.compare_headers(call, waiting)
    mine = owned[port.rank]
    contributions = np.empty((port.world_size, (mine.stop - mine.start) * WORD_BYTES), np.uint8)
    contributions[port.rank] = words[mine].view(np.uint8)
    rows = [
        Row(r, steps.row_words(port.own, r, len(words))[mine], contributions[r], start=mine.start)
        for r in range(port.world_size)
        if r != port.rank
    ]
    steps.collect(rows, waiting)
    result = without_reserved(sum_of(contributions, dtype).view(np.uint32))
    full_barrier()
    for dst_rank in steps.destinations():
        steps.send(dst_rank, steps.row_words(port.mailboxes[dst_rank], port.rank, len(words))[mine], result)
    rows = [
        Row(owner, steps.row_words(port.own, owner, len(words))[span], _bytes_of(out, span), start=span.start)
        for owner, span in enumerate(owned)
    ]
    steps.collect(rows, waiting)


_PROTOCOLS: dict[str, Reduce] = {"ll": ll, "two_shot": two_shot}


def _owned(num_words: int, rank: int, world_size: int) -> slice:
    """The words whose sum `rank` forms: whole chunks."""
    start, stop = part(num_words // CHUNK_WORDS, rank, world_size)
    return slice(start * CHUNK_WORDS, stop * CHUNK_WORDS)


def _bytes_of(out: Bytes, words: slice) -> Bytes:
    """The bytes of `out` that lie in `words`; the last chunk may be padded."""
    per_word = CHUNK_BYTES // CHUNK_WORDS
    return out[words.start * per_word : words.stop * per_word]
