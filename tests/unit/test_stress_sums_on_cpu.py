# SPDX-License-Identifier: Apache-2.0
"""The stress of sums: its kernels, run on the CPU from their PTX, against its numpy and the library's references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference
from stress import ledger, sum_oracle
from stress.host_sum_oracle import SumOracle, contribution, total, wrong_words
from stress.kernels.add_rows import Rows
from stress.kernels.boundary_check import BoundaryOutputs
from stress.kernels.boundary_fill import BoundaryInputs
from stress.kernels.sum_turn import SumTurn
from tests.mhc_cases import ulps
from tests.unit.stress_kernels import HIDDEN, NOTHING, REPLAY, RESERVED, Gpu

GATHER, ROWS = 1, 4


@pytest.fixture
def gpu(seed):
    return Gpu(seed)


def test_contributions_are_filled(gpu):
    num_words, rank = 333, 2
    x = gpu.room(4 * num_words)
    gpu.launch("sum_turn", SumTurn(NOTHING, NOTHING, (0, num_words, 0), 0, 0, 1), rank=rank, x=x)
    want = contribution(gpu.oracle.row(rank, GATHER, REPLAY + 1, num_words))
    assert torch.equal(gpu.get(x, want).view(torch.int16), want.view(torch.int16))
    assert want.isnan().any()


@pytest.mark.parametrize(("start", "stop"), [(0, 333), (100, 207), (5, 5)])
def test_sums_are_checked_and_a_wrong_one_is_named(gpu, start, stop):
    sums_ = total(gpu.oracle.rows(GATHER, REPLAY, 333))[start:stop].clone()
    assert stop == start or sums_.isnan().any()

    def check() -> ledger.LedgerReading:
        gpu.launch("sum_turn", SumTurn((0, start, 0), (0, stop, 0), NOTHING, 1, 0, 0), out=gpu.put(sums_))
        return gpu.reading()

    assert (reading := check()).bad_words == 0
    assert reading.gathers == 1
    if stop > start:
        place = int((~sums_.isnan().any(-1)).nonzero()[-1])
        wanted = int(sums_[place].view(torch.int32)) & 0xFFFFFFFF
        sums_[place, 1] += 1
        reading = check()
        assert reading.bad_words == 1
        assert (reading.first.replay, reading.first.gather, reading.first.index) == (REPLAY, GATHER, start + place)
        assert reading.first.wanted == wanted
        lost = int(sums_.isnan().any(-1).nonzero()[0])
        sums_[lost, 0] = 3.0
        assert check().bad_words == 2


def test_rows_are_added(gpu):
    payloads = gpu.oracle.rows(GATHER, REPLAY, 300)
    xs = torch.stack([contribution(row) for row in payloads])
    out = gpu.room(4 * 200)
    gpu.launch("add", Rows(gpu.put(xs), 300, 50, 250, out))
    want = total(payloads)[50:250]
    assert len(wrong_words(gpu.get(out, want), want)) == 0


@pytest.fixture
def case(gpu):
    return SumOracle(gpu.oracle, RESERVED, HIDDEN).boundary(GATHER, REPLAY, ROWS)


@pytest.fixture
def weight():
    return (1 + torch.arange(HIDDEN) % 8 / 8).bfloat16()


def test_what_a_boundary_takes_is_filled(gpu, case):
    wanted = (case.xs[1], case.residual, case.post, case.comb, case.pre)
    places = [gpu.room(one.nbytes) for one in wanted]
    gpu.launch("fill", BoundaryInputs(*places, GATHER, ROWS, 0, 0), rank=1)
    for place, want in zip(places, wanted, strict=True):
        seen = gpu.get(place, want)
        assert torch.equal(seen.view(torch.uint8), want.contiguous().view(torch.uint8))
    assert case.xs[1].isnan().any(-1).tolist() == [False, False, False, True]


def test_a_boundary_is_checked_and_a_wrong_one_is_named(gpu, case, weight):
    new_residual, h = (one.clone() for one in case.wanted(weight))

    def check() -> ledger.LedgerReading:
        places = gpu.put(new_residual), gpu.put(h)
        scratch, place = gpu.room(h.nbytes), gpu.put(weight)
        gpu.launch("check", BoundaryOutputs(0, *places, place, scratch, GATHER, ROWS, 0))
        return gpu.reading()

    assert check().bad_words == 0
    h.view(torch.int16)[1, 7] += 1  # one unit in the last place; the kernel's own norm may be one off as well
    h.view(torch.int16)[2, 8] += 3
    assert (reading := check()).bad_words in (1, 2)
    assert reading.first.src_rank == 1
    h = case.wanted(weight)[1].clone()
    new_residual[2, 3, 11] += 8
    reading = check()
    assert reading.bad_words == 1
    assert (reading.first.src_rank, reading.first.index) == (0, ((2 * 4 + 3) * HIDDEN + 11) // 2)


def test_a_boundary_is_computed_from_a_sum(gpu, case, weight):
    want_residual, want_h = case.wanted(weight)
    places = gpu.room(want_residual.nbytes), gpu.room(want_h.nbytes)
    scratch, y = gpu.room(want_h.nbytes), gpu.put(reference.all_reduce(case.xs))
    gpu.launch("mix", BoundaryOutputs(y, *places, gpu.put(weight), scratch, GATHER, ROWS, 0))
    assert len(wrong_words(gpu.get(places[0], want_residual), want_residual)) == 0
    assert ulps(gpu.get(places[1], want_h), want_h) <= 1


def test_every_way_occurs_and_the_reserved_words_are_lost():
    for op, ways in sum_oracle.WAYS.items():
        assert {sum_oracle.way_of(op, gather, words) for gather in range(3) for words in range(4, 400, 4)} == set(ways)
    words = np.array([EMPTY, ESCAPE, 5, EMPTY ^ 2], np.uint32)
    assert sum_oracle.is_reserved(words, np.uint32).tolist() == [1, 1, 0, 0]
    assert contribution(words).isnan().all(-1).tolist() == [True, True, False, False]
