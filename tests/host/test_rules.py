# SPDX-License-Identifier: Apache-2.0
"""Each rule of docs/mailbox.md, with its negative control: the same work fails once the rule is off.

The work is arranged so that the rare moment comes every time: a rank sleeps at the step that the rule is about.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nvcomm.errors import CollectiveMismatchError, PeerTimeoutError, UsageError
from nvcomm.host.steps import Steps
from nvcomm.host.transport import DirectTransport
from nvcomm.host.words import store_words
from nvcomm.mailbox import EMPTY, NUM_SLOTS
from tests.host.conftest import LATE_S

TIMEOUT_S = 0.4
# How long is waited for what a rank that obeys the rules never does, and for what has to come of a broken rule.
NEVER_S, SOON_S = 1.0, 5.0
BOTH = pytest.mark.parametrize("off", [False, True], ids=["on", "off"])


def wait_until(condition, limit_s: float) -> None:
    """Returns once `condition()` holds, or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def fill(rank: int, call: int, size: int) -> torch.Tensor:
    return torch.full((size,), 1 + 16 * call + rank, dtype=torch.uint8)


def count_bad(world, gather, sizes, late_rank=None, late_call=0, late_s=NEVER_S):
    """Gathers of `sizes` in turn; the number of wrong bytes over all ranks.

    To call `late_call` `late_rank` comes after the other rank has left, if that can be, and `late_s` later
    otherwise.
    """

    def work(engine):
        bad = 0
        other = world.engines[1 - engine.rank]
        for call, size in enumerate(sizes):
            if engine.rank == late_rank and call == late_call:
                wait_until(lambda: other.generation > engine.generation, late_s)
            out = gather(engine, fill(engine.rank, call, size))
            for rank, row in enumerate(out):
                bad += int((row != fill(rank, call, size)).sum())
        return bad

    results = world.run(work)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise errors[0]
    return sum(results)


def stall(world, step: str, calls: int = 2) -> None:
    """Rank 0 does not take `step` of its first calls before rank 1 has published once more than itself.

    That is allowed: another slot is free. What it must not meet there is what rank 0 has not cleared yet.
    """
    publishes = [0, 0]
    for engine in world.engines:
        steps = engine._steps

        def collect(*args, rank=engine.rank, original=steps.collect):
            publishes[rank] += 1
            return original(*args)

        steps.collect = collect
    steps = world.engines[0]._steps
    original = getattr(steps, step)

    def stalled(*args):
        if publishes[0] <= calls:
            wait_until(lambda: publishes[1] > publishes[0], 5.0)
        return original(*args)

    setattr(steps, step, stalled)


def rule(name: str, off: bool, timeout_s: float = 30.0) -> dict[str, object]:
    """Engine options. `timeout_s` is that of the broken protocol; with the rule on, nothing may time out."""
    return {"timeout_s": timeout_s, "mutations": frozenset({name})} if off else {}


@BOTH
def test_R1_clears_land_before_the_next_publish(ranks, gather, off):
    """Rank 0 is slow to clear; rank 1 must not have published into the slot again meanwhile."""
    world = ranks(2, **rule("R1", off, TIMEOUT_S))
    stall(world, "clear_due" if off else "clear")
    if off:
        with pytest.raises(PeerTimeoutError):  # its clear killed a word of rank 1
            count_bad(world, gather, [64] * 6)
    else:
        assert count_bad(world, gather, [64] * 6) == 0
        world.assert_audit()


@BOTH
def test_R2_a_rank_waits_for_its_own_copy(ranks, gather, off):
    world = ranks(2, **rule("R2", off))
    assert count_bad(world, gather, [64, 32]) == 0
    dirty = [engine.audit().dirty_words for engine in world.engines]
    assert dirty == ([64 // 4 + 32 // 4] * 2 if off else [0, 0])


@BOTH
def test_R3_clear_exactly_what_was_collected(ranks, gather, off):
    """Slot 0 sees 64, then 64 bytes again; a clear by the smaller call between leaves words behind."""
    world = ranks(2, **rule("R3", off))
    try:
        late_s = SOON_S if off else NEVER_S
        failed = count_bad(world, gather, [64, 16, 64, 16, 64], late_rank=0, late_call=2, late_s=late_s) > 0
    except PeerTimeoutError:  # a clear erased a younger word, which is waited for in vain
        failed = True
    assert failed is off
    if not off:
        world.assert_audit()


class SecondHalfFirst(DirectTransport):
    """Delivers the second half of a row, and once the reader has left, or after a while, the first: R4 allows it."""

    def __init__(self, reader, late_s):
        self._reader = reader
        self._late_s = late_s

    def store(self, lane, target, words):
        half, generation = len(words) // 2, self._reader.generation
        store_words(target[half:], words[half:])
        if lane // NUM_SLOTS == self._reader.rank:
            wait_until(lambda: self._reader.generation != generation, self._late_s)
        store_words(target[:half], words[:half])


@BOTH
def test_R4_every_word_is_its_own_flag(ranks, gather, off):
    world = ranks(2, **rule("R4", off))
    world.engines[1]._port.transport = SecondHalfFirst(world.engines[0], SOON_S if off else NEVER_S)
    assert (count_bad(world, gather, [64, 64]) > 0) is off


@BOTH
def test_R5_reserved_words_never_travel(ranks, gather, off):
    world = ranks(2, **rule("R5", off, TIMEOUT_S))
    x = torch.full((8,), EMPTY - 2**32, dtype=torch.int32)
    results = world.run(lambda engine: gather(engine, x).view(torch.int32))
    if off:
        assert all(isinstance(result, PeerTimeoutError) for result in results)
    else:
        assert all(torch.equal(result, torch.stack([x, x])) for result in results)


@BOTH
def test_R6_slots_are_used_in_turn(ranks, gather, off):
    world = ranks(2, **rule("R6", off, TIMEOUT_S))
    stall(world, "clear")
    if off:
        with pytest.raises(PeerTimeoutError):
            count_bad(world, gather, [64] * 4)
    else:
        assert count_bad(world, gather, [64] * 4) == 0


@BOTH
def test_R7_overlapping_calls_are_refused(ranks, gather, off):
    """Rank 0 waits for rank 1 in one thread while another thread calls too."""
    world = ranks(2, **rule("R7", off))
    engine = world.engines[0]
    waits = threading.Event()
    collect = engine._steps.collect
    engine._steps.collect = lambda *args: (waits.set(), collect(*args))
    first = threading.Thread(target=gather, args=(engine, torch.zeros(16)))
    first.start()
    assert waits.wait(LATE_S)
    world.hurry(TIMEOUT_S)
    with pytest.raises(PeerTimeoutError if off else UsageError):
        gather(engine, torch.zeros(16))
    gather(world.engines[1], torch.zeros(16))  # ends the first call
    first.join()


@BOTH
def test_R10_every_wait_is_bounded(ranks, gather, off):
    """Rank 1 comes when rank 0 has given up, or a second later if it never does."""
    world = ranks(2, **rule("R10", off))
    world.hurry()
    gave_up = threading.Event()

    def work(engine):
        if engine.rank == 1:
            gave_up.wait(1.0)
            return
        with pytest.raises(PeerTimeoutError):
            gather(engine, torch.zeros(4))
        gave_up.set()
        return

    def work_off(engine):
        if engine.rank == 1:
            time.sleep(1.0)
        return gather(engine, torch.zeros(4))

    results = world.run(work_off if off else work)
    assert all(isinstance(result, torch.Tensor) for result in results) is off
    assert gave_up.is_set() is not off


@BOTH
def test_R10b_reset_empties_the_mailboxes(ranks, gather, off):
    """Rank 0 published and gave up; without the reset's step (3) rank 1 reads those words in the next gather."""
    world = ranks(2, **rule("R10b", off))
    world.hurry()
    with pytest.raises(PeerTimeoutError):
        gather(world.engines[0], fill(0, 9, 64))
    world.hurry(LATE_S)
    assert world.run(lambda engine: engine.reset()) == [None, None]
    assert (count_bad(world, gather, [64], late_rank=0, late_s=SOON_S if off else NEVER_S) > 0) is off


@BOTH
def test_R11_ranks_agree_on_the_call(ranks, off):
    world = ranks(2, device_checks=1, **rule("R11", off))

    def work(engine):
        x = torch.ones(4, dtype=torch.float32 if engine.rank else torch.int32)
        out = torch.zeros((2, 4), dtype=x.dtype)
        engine.all_gather(x, out)

    results = world.run(work)
    if off:
        assert results == [None, None]
    else:
        assert all(isinstance(result, CollectiveMismatchError) for result in results)


@BOTH
def test_R12_an_empty_call_advances_nothing(ranks, gather, off):
    """An empty call that takes a slot lets rank 1 publish into the slot that rank 0 is still about to clear."""
    world = ranks(2, **rule("R12", off, TIMEOUT_S))
    stall(world, "clear", calls=1)
    if off:
        with pytest.raises(PeerTimeoutError):
            count_bad(world, gather, [64, 0, 64])
    else:
        assert count_bad(world, gather, [64, 0, 64]) == 0
        assert [engine.generation for engine in world.engines] == [2, 2]


def test_late_copy_reads_stale_words_and_the_mailbox_does_not(ranks, gather):
    """Rank 0's own copy of 64 bytes covers what is rank 1's row two calls later, and rank 1 is late."""
    sizes = [64, 16, 16]
    assert count_bad(ranks(2), gather, sizes, late_rank=1, late_call=2) == 0
    wrong = ranks(2, mutations=frozenset({"late-copy"}))
    assert count_bad(wrong, gather, sizes, late_rank=1, late_call=2, late_s=SOON_S) > 0


def test_no_rule_is_off_unless_it_is_asked_for(ranks):
    assert type(ranks(1).engines[0]._steps) is Steps
    with pytest.raises(UsageError, match="R99"):
        ranks(1, mutations=frozenset({"R99"}))
