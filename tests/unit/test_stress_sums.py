# SPDX-License-Identifier: Apache-2.0
"""The kernel that makes and compares the numbers of `--op mixed`, run on the CPU from its PTX."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from nvcomm import jit  # noqa: E402
from stress import ledger  # noqa: E402
from stress.device_oracle import THREADS  # noqa: E402
from stress.sums import NumbersKernel  # noqa: E402
from tests.unit.ptx_machine import Grid, Machine, Memory, Program  # noqa: E402


@functools.cache
def program(rows: int, compare: bool) -> Program:
    args = (Int64(0), Int64(0), Int32(1), Int32(0), Int32(1), Int64(0), Int32(1), make_fake_stream())
    return Program(jit.artifacts(NumbersKernel(rows, compare), *args, arch="sm_90a").ptx)


def numbers_of(payload: np.ndarray) -> torch.Tensor:
    """(rows, words) payload -> (2 * words,) bf16: the sum over the rows of 5 bits of each half word."""
    halves = payload.view(np.uint16).astype(np.int64) & 31
    return torch.from_numpy(halves.sum(0)).bfloat16()


@pytest.mark.parametrize(("start", "stop"), [(0, 333), (100, 207), (5, 5)])
def test_numbers_are_made_and_compared(start, stop, seed):
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 2**32, (3, 333), dtype=np.uint32)
    memory = Memory()
    machine = Machine(memory, seed)
    rows = memory.allocate(payload.tobytes())
    record = memory.allocate(bytes(4 * ledger.LEDGER_WORDS))
    made = memory.allocate(bytes(4 * 333))
    parameters = [rows, made, 333, 0, 333, record]
    machine.run([Grid(program(1, compare=False), parameters, ctas=2, threads=THREADS)])
    seen = torch.frombuffer(bytearray(memory.bytes_at(made, 4 * 333)), dtype=torch.bfloat16)
    assert torch.equal(seen, numbers_of(payload[:1]))

    sums = numbers_of(payload)[2 * start : 2 * stop]
    for wrong in (0, 2) if stop > start else (0,):
        given = sums.clone()
        given[: wrong * 4 : 4] += 1.0
        place = memory.allocate(given.view(torch.uint8).numpy().tobytes())
        memory.write(record + 4 * ledger.BAD_WORDS, 4, 0)
        parameters = [rows, place, 333, start, stop, record]
        machine.run([Grid(program(3, compare=True), parameters, ctas=1, threads=THREADS)])
        assert memory.read(record + 4 * ledger.BAD_WORDS, 4) == wrong
