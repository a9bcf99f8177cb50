# SPDX-License-Identifier: Apache-2.0
"""A wrong word goes into the rank's ledger."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from nvcomm.ptx import memory as ptx
from stress import ledger
from stress.kernels.kernel import WORD, Place


@cute.jit
def record(ledger_ptr: Int64, place: Place, row: int, index: Int32, seen: Uint32, want: Uint32 | None = None) -> None:
    """Counts a wrong word; the first one leaves its place and its bits.

    Args:
        ledger_ptr: the rank's ledger.
        place: the collective.
        row: source rank of a gather; of a boundary 1 for the normed output, else 0.
        index: of the word in the row.
        seen: its bits.
        want: what had to be there, for a sum: what a gather's word has to be follows from its place.
    """
    ptx.red_add_relaxed_gpu(ledger_ptr + ledger.BAD_WORDS * WORD, Uint32(1))
    if ptx.atom_cas_relaxed_gpu(ledger_ptr + ledger.LOCK * WORD, Uint32(0), Uint32(1)) == 0:
        fields = (place.replay, Uint32(place.gather), Uint32(row), Uint32(index), seen)
        for i in range_constexpr(len(fields)):
            ptx.st_relaxed_gpu(ledger_ptr + (ledger.FIRST_REPLAY + i) * WORD, fields[i])
        if const_expr(want is not None):
            ptx.st_relaxed_gpu(ledger_ptr + ledger.FIRST_WANTED * WORD, want)
