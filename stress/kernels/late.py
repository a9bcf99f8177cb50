# SPDX-License-Identifier: Apache-2.0
"""A kernel that is late: what comes behind it on the rank's stream is too."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvcomm.ptx import memory as ptx
from stress import oracle
from stress.kernels.kernel import WORD, RankHandle, StressKernel


class Late(NamedTuple):
    """`cell`: the ledger cell that holds the number of the replay to come."""

    cell: Int32


class LateKernel(StressKernel):
    """One thread that sleeps for as long as the oracle says for a replay."""

    work = Late
    threads = 1

    @cute.kernel
    def kernel(self, work: Late, handle: RankHandle) -> None:
        replay = ptx.ld_relaxed_gpu(handle.ledger + Int64(work.cell) * WORD)
        begin = cute.arch.globaltimer()
        end = begin + Int64(oracle.late_ns(handle.seed_key, replay, Uint32))
        while cute.arch.globaltimer() < end:
            pass
