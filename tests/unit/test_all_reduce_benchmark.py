# SPDX-License-Identifier: Apache-2.0
"""The data checks of the all-reduce benchmark, on tensors that no GPU has written."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from benchmarks import all_reduce_peer
from benchmarks.all_reduce import Boundary, all_equal
from nvcomm.reference import collectives as reference
from tests.mhc_cases import make_case


def test_what_was_found_once_is_not_found_again(seed):
    """A check behind the timing must not see what the one before it saw, nor that of two-shot what LL has left."""
    case = make_case(2, 3, 64, seed)
    want = reference.all_reduce(case.xs)
    outs = [want.clone() for _ in case.xs]
    assert all_equal(outs, want)
    assert not all_equal(outs, want)
    assert not all_equal([want.clone(), want + 1], want)


def test_a_boundary_found_once_is_not_found_again(seed):
    case = make_case(2, 3, 64, seed)
    mixes = (case.post, case.comb, case.pre, case.norm_weight)
    outputs = [[one.clone() for _ in case.xs] for one in case.wanted()]
    boundary = Boundary(case.xs, [case.residual] * 2, *mixes, *outputs)
    assert boundary.is_right()
    assert not boundary.is_right()
    for one, wanted in zip(outputs, case.wanted(), strict=True):
        for out in one:
            out.copy_(wanted)
    boundary.h[1][2] *= 1.5
    assert not boundary.is_right()


def test_between_processes_too(seed, monkeypatch):
    xs = make_case(2, 3, 64, seed).xs
    looks = []

    class Comm:
        rank = 1

        def all_reduce(self, x, out, protocol):
            assert x is xs[1]
            return out.copy_(reference.all_reduce(xs))

        def check(self):
            looks.append("checked")

    def median_us(op, is_right):
        y = op()
        looks.extend([is_right(y), is_right(y), is_right(op())])
        return 1.5

    monkeypatch.setattr(all_reduce_peer, "median_us", median_us)
    assert all_reduce_peer.ours(Comm(), xs, "ll") == 1.5
    assert looks == [True, False, True, "checked"]
