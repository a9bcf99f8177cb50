# SPDX-License-Identifier: Apache-2.0
"""What goes wrong ends in the right error on every rank, in time; reset() brings the group back (R10, R10b, R11)."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch

from nvcomm.errors import CollectiveMismatchError, GroupError, NvcommError, PeerTimeoutError, UsageError
from nvcomm.host.faults import MISMATCH, TIMEOUT, Fault, find_root
from nvcomm.host.recovery import above
from nvcomm.mailbox import FAULT_WORDS
from tests.host.conftest import LATE_S

TIMEOUT_S = 0.2


def ones(size: int = 64) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def test_timeout_names_rank_source_generation_slot_and_word(ranks, gather):
    world = ranks(3, generation=7)
    out = torch.zeros((3, 64), dtype=torch.uint8)
    world.run_clean(lambda engine: gather(engine, ones()))
    world.hurry(TIMEOUT_S)
    world.meet_before_waiting(0, 2)

    def work(engine):
        if engine.rank == 1:
            return None
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            engine.all_gather(ones(), out if engine.rank == 0 else torch.zeros_like(out))
        assert TIMEOUT_S <= time.monotonic() - started < TIMEOUT_S + LATE_S
        return caught.value

    errors = world.run(work)
    for rank in (0, 2):
        error = errors[rank]
        assert (error.rank, error.src_rank, error.root_rank) == (rank, 1, 1)
        assert (error.generation, error.slot, error.word) == (8, 1, 0)
        assert TIMEOUT_S <= error.waited_s < TIMEOUT_S + LATE_S
        assert world.engines[rank].stats().longest_wait_us[1] >= TIMEOUT_S * 1e6
    # What arrived is kept, what did not is -1.
    assert (out[0] == 1).all()
    assert (out[1] == 0xFF).all()
    assert (out[2] == 1).all()


def test_a_broken_rank_fills_its_output_and_raises_the_same_again(ranks, gather):
    world = ranks(2, timeout_s=TIMEOUT_S)
    engine = world.engines[0]
    assert engine.fault() is None
    with pytest.raises(PeerTimeoutError):
        gather(engine, ones())
    waited = engine.stats().longest_wait_us
    out = torch.zeros((2, 4), dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match="waited") as caught:
            engine.all_gather(torch.zeros(4, dtype=torch.int32), out)
        assert (out == -1).all()
        assert caught.value.src_rank == 1
    with pytest.raises(PeerTimeoutError):
        engine.check()
    assert engine.fault() is not engine.fault()
    assert engine.stats().longest_wait_us == waited  # nobody was waited for again


def test_missing_word_is_named_when_part_of_a_row_came(ranks, gather):
    world = ranks(2, timeout_s=TIMEOUT_S)
    row = world.engines[0]._port.own.rows[0][1]
    row[:5] = 3
    with pytest.raises(PeerTimeoutError) as caught:
        gather(world.engines[0], ones())
    assert caught.value.word == 5


def test_a_missing_escape_record_is_a_timeout_too(ranks, gather):
    from nvcomm.mailbox import ESCAPE

    world = ranks(2, timeout_s=TIMEOUT_S)
    world.engines[0]._port.own.rows[0][1][:16] = ESCAPE
    with pytest.raises(PeerTimeoutError) as caught:
        gather(world.engines[0], ones())
    assert caught.value.src_rank == 1


def test_the_root_is_found_through_the_fault_rows(ranks, gather):
    """Rank 2 never comes, rank 1 gives up on it; rank 0 gets its words for this call, but none for the next."""
    world = ranks(3)
    world.hurry(TIMEOUT_S)
    world.meet_before_waiting(0, 1)
    world.engines[0]._port.own.rows[0][2][:16] = 1
    results = world.run(lambda engine: engine.rank < 2 and gather(engine, ones()))
    assert isinstance(results[0], torch.Tensor), results[0]
    assert isinstance(results[1], PeerTimeoutError)
    world.engines[0]._port.own.rows[1][2][:16] = 1
    with pytest.raises(PeerTimeoutError, match="rank 2 published nothing") as caught:
        gather(world.engines[0], ones())
    assert (caught.value.src_rank, caught.value.root_rank) == (1, 2)


def test_find_root_ends_in_a_circle_and_at_a_mismatch():
    faults = np.zeros((3, FAULT_WORDS), np.uint32)
    first = Fault(TIMEOUT, 0, 1, 5, 1, 0, 10)
    Fault(TIMEOUT, 1, 0, 5, 1, 0, 10).store(faults[1])
    assert find_root(first, faults) == 1
    Fault(MISMATCH, 2, 0, 5, 1, 0, 10).store(faults[2])
    Fault(TIMEOUT, 1, 2, 5, 1, 0, 1 << 40).store(faults[1])
    assert find_root(first, faults) == 2
    assert Fault.load(faults[0]) is None
    assert Fault.load(faults[1]) == Fault(TIMEOUT, 1, 2, 5, 1, 0, 0xFFFFFFFF)


@pytest.mark.parametrize("start", [0, (1 << 32) - 2])
def test_reset_brings_the_group_back(ranks, gather, start):
    world = ranks(3, generation=start)

    def work(engine):
        for _ in range(2):
            gather(engine, ones())
        engine._port.timeout_s = TIMEOUT_S
        if engine.rank != 2:
            with pytest.raises(PeerTimeoutError):
                gather(engine, ones(32))
        engine._port.timeout_s = LATE_S
        engine.reset()
        assert engine.fault() is None
        place = (engine.generation, engine.slot)
        for call in range(20):
            out = gather(engine, ones(16 + call) * (call + engine.rank))
            assert [row.unique().tolist() for row in out] == [[call + rank] for rank in range(3)]
        return place

    assert world.run_clean(work) == [((start + 3) % (1 << 32), 0)] * 3


def test_reset_without_a_rank_raises_and_stays_broken(ranks, gather):
    world = ranks(2)
    engine = world.engines[0]
    with pytest.raises(GroupError, match="rank 1") as caught:
        engine.reset(2.0)
    assert caught.value.missing == (1,)
    with pytest.raises(GroupError):
        gather(engine, ones())
    # Rank 1 comes to the attempt that rank 0 has left: both learn at once that they are at different places.
    results = world.run(lambda one: one.reset(LATE_S))
    assert all(isinstance(result, GroupError) and "is at" in str(result) for result in results), results
    assert world.run(lambda one: one.reset(LATE_S)) == [None, None]
    world.run_clean(lambda one: gather(one, ones()))


@pytest.mark.parametrize(
    ("generations", "expected"),
    [([4, 4], 5), ([4, 5, 3], 6), ([(1 << 32) - 1, 0], 1), ([0, (1 << 32) - 1], 1), ([(1 << 32) - 1] * 2, 0)],
)
def test_the_generation_after_a_reset_is_above_all(generations, expected):
    assert above(generations) == expected


@pytest.mark.parametrize("differ", ["size", "dtype", "tag", "nothing to send"])
def test_R11_names_both_sides_with_the_same_text(ranks, differ):
    world = ranks(3, device_checks=1)

    def work(engine):
        other = engine.rank == 1
        dtype = torch.float32 if differ == "dtype" and other else torch.int32
        count = {"size": 5, "nothing to send": 0}.get(differ, 4) if other else 4
        x = torch.ones(count, dtype=dtype)
        out = torch.zeros((3, count), dtype=dtype)
        engine.tag = 9 if differ == "tag" and other else 0
        with pytest.raises(CollectiveMismatchError) as caught:
            engine.all_gather(x, out)
        assert (out.view(torch.uint8) == 0xFF).all()
        with pytest.raises(CollectiveMismatchError):
            engine.check()
        engine.reset()
        engine.tag = 1
        engine.all_gather(torch.ones(4), torch.zeros((3, 4)))
        return str(caught.value)

    texts = world.run_clean(work)
    assert len(set(texts)) == 1
    assert "rank 0 calls all_gather of 16 bytes of int32, tag 0" in texts[0]
    seen = {"size": "20 bytes", "dtype": "float32", "tag": "tag 9", "nothing to send": "of 0 bytes"}[differ]
    assert seen in texts[0]


def test_R11_checks_on_and_all_agree(ranks, gather):
    def work(engine):
        for size in (0, 1, 4096, 0, 17):
            engine.tag = size
            gather(engine, ones(size))

    ranks(3, device_checks=1).run_clean(work)


def test_R11_a_rank_that_calls_nothing_is_a_timeout(ranks, gather):
    world = ranks(2, device_checks=1, timeout_s=TIMEOUT_S)
    out = torch.zeros((2, 4))
    with pytest.raises(PeerTimeoutError):
        world.engines[0].all_gather(torch.ones(4), out)
    assert (out.view(torch.uint8) == 0xFF).all()


def test_a_call_that_is_interrupted_breaks_the_rank(ranks, gather):
    world = ranks(2)
    engine = world.engines[0]

    def interrupted(*args):
        raise KeyboardInterrupt

    engine._steps.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        gather(engine, ones())
    with pytest.raises(NvcommError, match="half-way"):
        gather(engine, ones())
    world.run(lambda one: one.reset())
    world.run_clean(lambda one: gather(one, ones()))


def test_use_after_fork_is_refused(ranks):
    engine = ranks(1).engines[0]
    pid = os.fork()
    if pid == 0:  # the child reports by its exit code alone
        code = 1
        try:
            engine.all_gather(ones(), torch.empty(64, dtype=torch.uint8))
        except UsageError as error:
            engine.close()  # harmless: the parent's
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    engine.all_gather(ones(), torch.empty(64, dtype=torch.uint8))


def test_close_while_a_call_is_under_way_is_refused(ranks, gather):
    world = ranks(2)
    first, second = world.engines
    caller = threading.Thread(target=gather, args=(first, ones()))
    caller.start()
    while not first._busy.locked():
        time.sleep(0.001)
    with pytest.raises(UsageError, match="inside"):
        first.close()
    gather(second, ones())  # now the other call ends
    caller.join()
    first.close()
