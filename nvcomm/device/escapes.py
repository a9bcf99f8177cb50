# SPDX-License-Identifier: Apache-2.0
"""What a chunk's ESCAPE words were: the row's record tells (R5)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import mailbox
from nvcomm.device.collect import collect_word
from nvcomm.device.view import Mailbox
from nvcomm.mailbox import CHUNK_WORDS, EMPTY, ESCAPE
from nvcomm.ptx import memory as ptx

FILL = 0xFFFFFFFF  # what a caller finds where nothing arrived: -1 as an index, NaN as a float (R10)


@cute.jit
def restore_escapes(
    box: Mailbox,
    words: cute.Tensor,
    chunk: Int32,
    src_rank: int,
    num_rows: cutlass.Constexpr,
    active: Boolean,
    wait: cute.Tensor,
) -> None:
    """A warp that saw an ESCAPE reads the row's record, restores its words, and clears the record once (R3, R5).

    Called when no lane polls any more (R4). `src_rank` is the first of the `num_rows` rows in `words`.
    """
    lane = cute.arch.lane_idx()
    for r in range_constexpr(num_rows):
        seen = Boolean(False)
        for i in range_constexpr(CHUNK_WORDS):
            seen = seen | (words[r * CHUNK_WORDS + i] == Uint32(ESCAPE))
        if cute.arch.vote_any_sync(seen & active):
            addr = box.own + box.record(src_rank + r, chunk // mailbox.CHUNKS_PER_RECORD)
            addr = addr + Int64(lane // CHUNK_WORDS) * 4
            flags = collect_word(box, addr, chunk, src_rank + r, wait)
            bits = flags >> Uint32((lane % CHUNK_WORDS) * CHUNK_WORDS)
            for i in range_constexpr(CHUNK_WORDS):
                was_empty = (words[r * CHUNK_WORDS + i] == Uint32(ESCAPE)) & (((bits >> Uint32(i)) & Uint32(1)) == 1)
                # EMPTY is ESCAPE without its lowest bit
                words[r * CHUNK_WORDS + i] = words[r * CHUNK_WORDS + i] - Uint32(was_empty)
            if flags == Uint32(EMPTY):  # timed out
                for i in range_constexpr(CHUNK_WORDS):
                    words[r * CHUNK_WORDS + i] = Uint32(FILL)
            cute.arch.sync_warp()  # four lanes share a record word: all have read before one clears
            if lane % CHUNK_WORDS == 0:
                ptx.st_relaxed_sys(addr, Uint32(EMPTY))
