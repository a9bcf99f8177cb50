# SPDX-License-Identifier: Apache-2.0
"""The bound of every wait: a thread that polls looks at the clock, gives up, and tells everybody (R10)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from nvcomm import mailbox
from nvcomm.device.view import Mailbox
from nvcomm.mailbox import CHUNK_WORDS, EMPTY
from nvcomm.ptx import memory as ptx

# Failed polls between two looks at the clock. A poll is an L2 round trip, so this is some 0.1 ms: waits below it
# cost nothing, and are not in `stats()` either.
POLLS_PER_CLOCK = 256
FAULT_TIMEOUT = 1
FAULT_OVERLAP = 2
FAULT_MISMATCH = 3


def new_wait() -> cute.Tensor:
    """One Int64 register that a thread keeps over a call; see `collect_chunk`."""
    wait = cute.make_rmem_tensor(1, Int64)
    wait[0] = Int64(0)
    return wait


@cute.jit
def look_at_clock(
    box: Mailbox, words: cute.Tensor, chunk: Int32, src_rank: int, num_rows: cutlass.Constexpr, wait: cute.Tensor
) -> None:
    """After many failed polls: notes the wait, and gives up when it lasted `timeout_ns` or another thread gave up."""
    now = cute.arch.globaltimer()
    if wait[0] == 0:
        wait[0] = now
    waited_us = Uint32((now - wait[0]) // 1000)
    first = Int32(0)
    for i in range_constexpr(num_rows * CHUNK_WORDS - 1, -1, -1):
        if words[i] == Uint32(EMPTY):
            first = Int32(i)
    row = src_rank + first // CHUNK_WORDS
    ptx.red_max_relaxed_gpu(box.handle.state + Int64(mailbox.STATE_WAITS + row) * 4, waited_us)
    if now - wait[0] > box.handle.timeout_ns:
        report(box, FAULT_TIMEOUT, Int32(row), Uint32(chunk * CHUNK_WORDS + first % CHUNK_WORDS), waited_us)
        wait[0] = Int64(-1)
    if ptx.ld_relaxed_gpu(box.handle.state + mailbox.STATE_BROKEN * 4) != 0:
        wait[0] = Int64(-1)


@cute.jit
def report(box: Mailbox, kind: int, src_rank: Int32, word: Uint32, waited_us: Uint32) -> None:
    """Breaks the communicator; the first thread that does writes what it saw to the host and to every fault row."""
    if ptx.atom_cas_relaxed_gpu(box.handle.state + mailbox.STATE_BROKEN * 4, Uint32(0), Uint32(kind)) == 0:
        record = (Uint32(box.rank), Uint32(src_rank), box.generation, box.slot, word, waited_us)
        targets = [peer + box.layout.fault_offset(Int64(box.rank)) for peer in box.handle.peers]
        for target in (box.handle.fault_record, *targets):
            for i in range_constexpr(len(record)):
                ptx.st_relaxed_sys(target + (i + 1) * 4, record[i])
            ptx.st_release_sys(target, Uint32(kind))  # last: whoever reads the kind reads the whole record
