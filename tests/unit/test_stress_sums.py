# SPDX-License-Identifier: Apache-2.0
"""The stress of sums: its kernels, run on the CPU from their PTX, against its numpy and the library's references."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm import jit
from nvcomm.mailbox import EMPTY, ESCAPE
from nvcomm.reference import collectives as reference
from stress import boundary, ledger, sum_oracle, sums
from stress.device_oracle import THREADS
from stress.host_oracle import HostOracle
from stress.host_sums import SumOracle, contribution, total, wrong_words
from tests.emulator.machine import Machine
from tests.emulator.memory import Memory
from tests.emulator.program import Launch, Program
from tests.mhc_cases import ulps

RANKS, HIDDEN, ROWS, RESERVED = 3, 64, 4, 6000
REPLAY, GATHER = 1_234_567, 1
NOTHING = [0, 0, 0]


@functools.cache
def program(kernel: str) -> Program:
    built, args = {
        "turn": lambda: (sums.SumTurnKernel(RANKS), sums.turn_args()),
        "add": lambda: (sums.AddRowsKernel(RANKS), sums.add_args()),
        "fill": lambda: (boundary.FillKernel(HIDDEN), boundary.fill_args()),
        "check": lambda: (boundary.BoundaryKernel(RANKS, HIDDEN, compare=True), boundary.boundary_args()),
        "mix": lambda: (boundary.BoundaryKernel(RANKS, HIDDEN, compare=False), boundary.boundary_args()),
    }[kernel]()
    return Program(jit.artifacts(built, *args, arch="sm_90a").ptx)


class Gpu:
    """Memory with a ledger, and launches of one kernel."""

    def __init__(self, seed: int) -> None:
        self.oracle = HostOracle(seed, RANKS, RESERVED)
        self.memory = Memory(seed)
        self._machine = Machine(self.memory, seed)
        cells = np.zeros(ledger.LEDGER_WORDS, np.uint32)
        cells[0] = REPLAY
        self.ledger = self.memory.allocate(cells.tobytes())

    def put(self, tensor: torch.Tensor) -> int:
        return self.memory.allocate(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def room(self, num_bytes: int) -> int:
        return self.memory.allocate(bytes(num_bytes))

    def get(self, addr: int, like: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.memory.bytes_at(addr, like.nbytes)), dtype=like.dtype).view(like.shape)

    def launch(self, kernel: str, *parameters: int | list[int], shared_bytes: int = 0) -> None:
        flat = [one for given in parameters for one in (given if isinstance(given, list) else [given])]
        self._machine.run([[Launch(program(kernel), flat, (2, 1, 1), THREADS, shared_bytes=shared_bytes)]])

    def reading(self) -> ledger.LedgerReading:
        words = self.memory.bytes_at(self.ledger, 4 * ledger.LEDGER_WORDS)
        self.memory.write(self.ledger + 4 * ledger.LOCK, 4, 0)
        self.memory.write(self.ledger + 4 * ledger.BAD_WORDS, 4, 0)
        return ledger.read(np.frombuffer(words, np.uint32).tolist())


@pytest.fixture
def gpu(seed):
    return Gpu(seed)


def test_contributions_are_filled(gpu):
    num_words, rank = 333, 2
    x, lengths = gpu.room(4 * num_words), [0, num_words, 0]
    gpu.launch(
        "turn", x, 0, x, 0, gpu.ledger, gpu.oracle.seed_key, RESERVED, rank, NOTHING, NOTHING, lengths, 0, 0, 1,
    )  # fmt: skip
    want = contribution(gpu.oracle.row(rank, GATHER, REPLAY + 1, num_words))
    assert torch.equal(gpu.get(x, want).view(torch.int16), want.view(torch.int16))
    assert want.isnan().any()


@pytest.mark.parametrize(("start", "stop"), [(0, 333), (100, 207), (5, 5)])
def test_sums_are_checked_and_a_wrong_one_is_named(gpu, start, stop):
    sums_ = total(gpu.oracle.rows(GATHER, REPLAY, 333))[start:stop].clone()
    assert stop == start or sums_.isnan().any()

    def check() -> ledger.LedgerReading:
        held = gpu.put(sums_)
        limits = [0, start, 0], [0, stop, 0]
        gpu.launch("turn", held, 0, held, 0, gpu.ledger, gpu.oracle.seed_key, RESERVED, 0, *limits, NOTHING, 1, 0, 0)
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
    gpu.launch("add", gpu.put(xs), 300, 50, 250, out)
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
    gpu.launch("fill", *places, gpu.ledger, gpu.oracle.seed_key, RESERVED, 1, GATHER, ROWS, 0, 0)
    for place, want in zip(places, wanted, strict=True):
        seen = gpu.get(place, want)
        assert torch.equal(seen.view(torch.uint8), want.contiguous().view(torch.uint8))
    assert case.xs[1].isnan().any(-1).tolist() == [False, False, False, True]


def test_a_boundary_is_checked_and_a_wrong_one_is_named(gpu, case, weight):
    new_residual, h = (one.clone() for one in case.wanted(weight))

    def check() -> ledger.LedgerReading:
        places = gpu.put(new_residual), gpu.put(h)
        scratch, place = gpu.room(h.nbytes), gpu.put(weight)
        gpu.launch(
            "check", 0, *places, place, scratch, gpu.ledger, gpu.oracle.seed_key, RESERVED, GATHER, ROWS, 0,
            shared_bytes=4 * boundary.WARPS,
        )  # fmt: skip
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
    gpu.launch(
        "mix", y, *places, gpu.put(weight), scratch, gpu.ledger, gpu.oracle.seed_key, RESERVED, GATHER, ROWS, 0,
        shared_bytes=4 * boundary.WARPS,
    )  # fmt: skip
    assert len(wrong_words(gpu.get(places[0], want_residual), want_residual)) == 0
    assert ulps(gpu.get(places[1], want_h), want_h) <= 1


def test_every_way_occurs_and_the_reserved_words_are_lost():
    for op, ways in sum_oracle.WAYS.items():
        assert {sum_oracle.way_of(op, gather, words) for gather in range(3) for words in range(4, 400, 4)} == set(ways)
    words = np.array([EMPTY, ESCAPE, 5, EMPTY ^ 2], np.uint32)
    assert sum_oracle.is_reserved(words, np.uint32).tolist() == [1, 1, 0, 0]
    assert contribution(words).isnan().all(-1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_compile_check_of_the_kernels_around_sums(target):
    for kernel, args in (
        (sums.SumTurnKernel(4), sums.turn_args()),
        (sums.AddRowsKernel(4), sums.add_args()),
        (boundary.FillKernel(5120), boundary.fill_args()),
        (boundary.BoundaryKernel(4, 5120, compare=True), boundary.boundary_args()),
        (boundary.BoundaryKernel(4, 5120, compare=False), boundary.boundary_args()),
    ):
        built = jit.artifacts(kernel, *args, arch=target)
        (usage,) = built.usage.values()
        assert usage.frame_bytes == 0
        assert "griddepcontrol" not in built.ptx  # full edges to the collectives around it
