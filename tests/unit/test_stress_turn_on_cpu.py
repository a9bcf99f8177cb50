# SPDX-License-Identifier: Apache-2.0
"""The turn, run on the CPU from its PTX, against the oracle in numpy: it fills what it must, it sees any wrong word."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

from stress import oracle
from stress.kernels.turn import Turn
from tests.unit.stress_kernels import NOTHING, RANKS, REPLAY, Gpu

SIZES = (4, 531, 130)
STRIDE = 4 * 531 * RANKS


@pytest.fixture
def gpu(seed):
    return Gpu(seed)


def outputs(gpu: Gpu, replay: int, sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    """What has to lie at `out`."""
    words = np.zeros((len(sizes), STRIDE // 4), np.uint32)
    for gather, size in enumerate(sizes):
        words[gather, : RANKS * size] = gpu.oracle.rows(gather, replay, size).reshape(-1)
    return words


def check(gpu: Gpu, out: np.ndarray, *, step: int = 0):
    place = gpu.memory.allocate(out.tobytes())
    gpu.launch("turn", Turn(SIZES, NOTHING, 0, 1, step), out=place, stride=STRIDE)
    return gpu.reading()


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("step", [0, 1])
def test_inputs_are_filled_for_this_or_the_next_replay(gpu, rank, step):
    x = gpu.room(STRIDE * len(SIZES))
    gpu.launch("turn", Turn(NOTHING, SIZES, 0, 5, step), rank=rank, x=x, stride=STRIDE)
    filled = np.frombuffer(gpu.memory.bytes_at(x, STRIDE * len(SIZES)), np.uint32).reshape(len(SIZES), -1)
    for gather, size in enumerate(SIZES):
        assert np.array_equal(filled[gather, :size], gpu.oracle.row(rank, gather, REPLAY + step, size))
        assert not filled[gather, size:].any()
    assert gpu.cells()[5] == REPLAY + step
    assert gpu.reading().gathers == 0


@pytest.mark.parametrize("replay", [0, REPLAY, oracle.REPLAY_MASK])
def test_right_outputs_are_right_and_counted(seed, replay):
    gpu = Gpu(seed, replay)
    reading = check(gpu, outputs(gpu, replay))
    assert (reading.bad_words, reading.first, reading.gathers) == (0, None, len(SIZES))


@pytest.mark.parametrize("replay", [0, oracle.REPLAY_MASK])
@pytest.mark.parametrize(
    ("gather", "src_rank", "index"),
    [(g, r, i) for g in range(len(SIZES)) for r in (0, RANKS - 1) for i in (0, SIZES[g] - 1)],
)
def test_one_flipped_bit_is_counted_once_and_placed(seed, gather, src_rank, index, replay):
    """In the first and the last replay, gather, rank and word."""
    gpu = Gpu(seed, replay)
    out = outputs(gpu, replay)
    out[gather, src_rank * SIZES[gather] + index] ^= np.uint32(1 << ((7 * index + src_rank) % 32))
    reading = check(gpu, out)
    assert reading.bad_words == 1
    first = reading.first
    assert (first.replay, first.gather, first.src_rank, first.index) == (replay, gather, src_rank, index)
    assert first.seen == int(out[gather, src_rank * SIZES[gather] + index])


def test_outputs_of_the_replay_before_are_all_wrong(gpu):
    # Reserved words may agree by chance: about one in eleven here, and there are two of them.
    assert check(gpu, outputs(gpu, REPLAY - 1)).bad_words > 0.98 * RANKS * sum(SIZES)


def test_what_is_not_to_be_checked_is_not_counted(gpu):
    """The count of gathers is the kernel's own: a launch without anything to check leaves it as it is."""
    out = gpu.memory.allocate(np.zeros((len(SIZES), STRIDE // 4), np.uint32).tobytes())
    gpu.launch("turn", Turn((0, SIZES[1], 0), NOTHING, 0, 1, 0), out=out, stride=STRIDE)
    reading = gpu.reading()
    assert reading.gathers == 1
    assert reading.bad_words == RANKS * SIZES[1]
