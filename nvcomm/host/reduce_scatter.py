# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter between CPU ranks: each rank gets the sum of its own rows, of the same bits as an all-reduce's.

To rank d goes what its rows need, in whole chunks and at the places that an all-reduce would use. Where d owns no row
it gets one token word from everybody, so that everybody still waits for everybody (docs/mailbox.md R12).
"""

from __future__ import annotations

import numpy as np
import torch

from nvcomm.errors import NvcommError
from nvcomm.host import headers
from nvcomm.host.reduce import part, sum_of, without_reserved
from nvcomm.host.steps import FILL, Row, Steps
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Bytes
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, WORD_BYTES, num_chunks

_TOKEN = slice(0, 1)


def reduce_scatter(
    steps: Steps, payload: Bytes, out: Bytes, call: headers.Call, dtype: torch.dtype, num_rows: int
) -> None:
    """Sums this rank's rows of every rank's `payload`.

    Args:
        steps: of this rank.
        payload: (num_bytes,), `num_rows` rows of whole elements.
        out: the bytes of this rank's rows, overwritten; may be empty.
        call: what is called, for R11.
        dtype: of the elements.
        num_rows: over all ranks.

    Raises:
        PeerTimeoutError, CollectiveMismatchError: as `all_gather`; `out` is 0xFF.
    """
    if not len(payload) and not steps.checks:
        steps.empty_call()
        return
    try:
        _reduce_scatter(steps, payload, out, call, dtype, num_rows)
    except NvcommError:
        out[...] = FILL
        raise
    steps.advance(len(payload))


def _reduce_scatter(
    steps: Steps, payload: Bytes, out: Bytes, call: headers.Call, dtype: torch.dtype, num_rows: int
) -> None:
    port, waiting = steps.port, Waiting(steps.timeout_s())
    row_bytes = len(payload) // num_rows if num_rows else 0
    parts = [[row * row_bytes for row in part(num_rows, rank, port.world_size)] for rank in range(port.world_size)]
    words = without_reserved(steps.pad(payload))
    steps.begin(call)
    for dst_rank in steps.destinations() if len(words) else ():
        span = _cover(*parts[dst_rank])
        target = steps.row_words(port.mailboxes[dst_rank], port.rank, len(words))
        steps.send(dst_rank, target[span], words[span])
    steps.compare_headers(call, waiting)
    start, stop = parts[port.rank]
    span = _cover(start, stop)
    contributions = np.empty((port.world_size, (span.stop - span.start) * WORD_BYTES), np.uint8)
    rows = [
        Row(r, steps.row_words(port.own, r, len(words))[span], contributions[r], start=span.start)
        for r in steps.sources()
    ]
    steps.collect(rows, waiting)
    if stop > start:
        first = start - span.start * WORD_BYTES
        out[:] = sum_of(contributions, dtype)[first : first + len(out)]


def _cover(start: int, stop: int) -> slice:
    """The words of the chunks that hold bytes `start` to `stop`; a token where there are none."""
    if stop == start:
        return _TOKEN
    return slice(start // CHUNK_BYTES * CHUNK_WORDS, num_chunks(stop) * CHUNK_WORDS)
