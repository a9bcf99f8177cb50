# SPDX-License-Identifier: Apache-2.0
"""What the host does for GPU ranks, without a GPU: the order of eager calls (R7), loading (R9), arming, reset() (R10b).

CUDA's part is played by stand-ins that write down what is asked of them; mailbox and state are tensors on the CPU.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm import mailbox, streams
from nvcomm.collectives import engine as engine_module
from nvcomm.collectives import mailbox_kernel
from nvcomm.collectives.engine import DeviceEngine
from nvcomm.collectives.fault_report import RESET_FAILED
from nvcomm.collectives.world import CudaWorld
from nvcomm.device import FAULT_TIMEOUT
from nvcomm.errors import GroupError, PeerTimeoutError, UnsupportedError
from nvcomm.mailbox import EMPTY, MailboxLayout
from nvcomm.options import Options

LAYOUT = MailboxLayout(2, 1024)
EMPTY_INT32 = EMPTY - 2**32


class Cuda:
    """Stands in for torch.cuda as `streams` uses it."""

    def __init__(self):
        self.log = []
        self.capturing = False
        self.now_on("a")

    def now_on(self, name):
        """Makes a stream current; its handle follows from its name."""
        self.stream = SimpleNamespace(cuda_stream=ord(name), wait_event=lambda event: self.log.append(f"{name} waits"))
        self.name = name

    def current_stream(self, device):
        return self.stream

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self):
        return SimpleNamespace(record=lambda stream: self.log.append(f"{chr(stream.cuda_stream)} records"))


@pytest.fixture
def order(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    return streams.CallOrder("cuda:0"), cuda


def call(order, cuda, name):
    """An eager or captured call on a stream, as `DeviceEngine` makes it."""
    cuda.now_on(name)
    handle, eager = order.enter()
    assert handle == ord(name)
    cuda.log.append(f"{name} launches")
    if eager:
        order.leave(handle)


def test_R7_an_eager_call_from_another_stream_waits_for_the_last_one(order):
    for name in "aabba":
        call(*order, name)
    assert order[1].log == [
        *("a launches", "a records", "a launches", "a records"),
        *("b waits", "b launches", "b records", "b launches", "b records"),
        *("a waits", "a launches", "a records"),
    ]


def test_R7_while_capturing_nothing_is_recorded_and_nothing_waited_for(order):
    _, cuda = order
    call(*order, "a")
    cuda.capturing = True
    call(*order, "b")
    cuda.capturing = False
    call(*order, "a")  # the last eager call was on this stream
    assert cuda.log == ["a launches", "a records", "b launches", "a launches", "a records"]


@pytest.fixture
def rank(monkeypatch):
    """An engine after some calls, with a mailbox full of old words, a fault, and counts."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    engine = DeviceEngine.__new__(DeviceEngine)
    words = torch.arange(LAYOUT.size_bytes // 4, dtype=torch.int32) + 1
    engine.memory = SimpleNamespace(local=lambda: words)
    engine.layout, engine.device, engine.rank, engine.options = LAYOUT, torch.device("cpu"), 1, Options(timeout_s=0.5)
    engine._state = torch.full((mailbox.STATE_WORDS,), 3, dtype=torch.int32)
    engine._fault_words = np.full(mailbox.FAULT_WORDS, 1, np.uint32)
    engine._total_calls, engine._last_generation, engine._total_escapes, engine._last_escapes = 5, 1, 0, 0
    engine._marker = None
    return engine


def assert_armed(engine, generation):
    words = engine.memory.local()
    assert (words[: LAYOUT.faults_base // 4] == EMPTY_INT32).all()
    assert (words[LAYOUT.faults_base // 4 :] == 0).all()
    state = engine._state.numpy().view(np.uint32)
    assert (state[mailbox.STATE_SLOT], state[mailbox.STATE_GENERATION]) == (0, generation)
    assert (state[mailbox.STATE_BUSY], state[mailbox.STATE_BROKEN], state[mailbox.STATE_ARRIVED]) == (0, 0, 0)
    assert state[mailbox.STATE_ENDED] == 0  # of calls that overlapped: else no later one gives the busy word back
    assert not engine._fault_words.any()


@pytest.mark.parametrize("generation", [0, 7, 2**32 - 1])
def test_R10b_arming_empties_mailbox_and_state_and_keeps_the_counts(rank, generation):
    rank.arm(generation)
    assert_armed(rank, generation)
    assert rank._state[mailbox.STATE_ESCAPES] == 3
    assert rank._calls(rank.state()) == 5 + 2  # generations 1 to 3 before it


def test_counts_go_over_the_end_of_32_bits(rank):
    rank.world_size = 2
    for generation, escapes in ((2**31, 10), (2**32 - 1, 2**32 - 6), (4, 4), (1, 0)):
        rank._state[mailbox.STATE_GENERATION] = engine_module._signed(generation)
        rank._state[mailbox.STATE_ESCAPES] = engine_module._signed(escapes)
        stats = rank.stats()
    # the fixture's calls began at generation 1, and the count came by 1 again twice
    assert (stats.calls, stats.escapes) == (5 + 2 * 2**32, 2 * 2**32)


def test_counts_and_audit_wait_for_calls_on_every_stream(rank, monkeypatch):
    def synchronize(device):
        assert device == rank.device
        rank.memory.local()[: LAYOUT.faults_base // 4].fill_(EMPTY_INT32)
        rank._state[mailbox.STATE_GENERATION] = 6

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    rank.world_size = 2
    assert rank.stats().calls == 5 + 5
    rank.memory.local().zero_()
    assert rank.audit().dirty_words == 0


class Others:
    """The other ranks and the markers: what is asked of them is written down, with the mailbox's first word then."""

    def __init__(self, engine, fails=""):
        self.engine, self.fails, self.log = engine, fails, []

    def step(self, name):
        self.log.append((name, int(self.engine.memory.local()[0])))
        if name == self.fails:
            raise GroupError(f"nobody at {name}")

    def exchange(self, tag, value, timeout_s):
        assert timeout_s == 2 * self.engine.options.timeout_s
        self.step(tag)
        return [9, value]

    def barrier(self, tag, timeout_s):
        self.step(tag)

    def blank(self):
        self.engine.memory.local().zero_()
        self.step("blank")

    def publish(self):
        self.step("publish")

    def wait(self, timeout_s):
        self.step("wait")


def test_R10b_reset_meets_the_others_arms_and_meets_them_again(rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: rank._group.step("drain"))
    rank._group = Others(rank)
    rank.reset()
    names = [name for name, _ in itertools.groupby(name for name, _ in rank._group.log)]
    assert names == ["drain", "nvcomm.reset.drained", "drain", "nvcomm.reset.armed"]
    assert ("nvcomm.reset.drained", 1) in rank._group.log  # not armed yet: others may still send
    assert rank._group.log[-1] == ("nvcomm.reset.armed", EMPTY_INT32)
    assert_armed(rank, 10)


def test_R10b_with_multicast_markers_stand_between_blank_and_arm(rank):
    rank._group = rank._marker = Others(rank)
    rank.reset()
    assert rank._group.log == [
        *(("blank", 0), ("nvcomm.reset.drained", 0), ("publish", 0), ("wait", 0)),
        ("nvcomm.reset.armed", EMPTY_INT32),
    ]
    assert_armed(rank, 10)


@pytest.mark.parametrize("where", ["blank", "nvcomm.reset.drained", "publish", "wait", "nvcomm.reset.armed"])
@pytest.mark.parametrize("broken", [False, True])
def test_R10b_a_reset_that_fails_leaves_the_rank_broken(rank, where, broken):
    if not broken:
        rank._fault_words[:] = 0
        rank._state[mailbox.STATE_BROKEN] = 0
    rank._group = rank._marker = Others(rank, where)
    with pytest.raises(GroupError, match=f"nobody at {where}"):
        rank.reset()
    assert rank._state[mailbox.STATE_BROKEN] == RESET_FAILED  # graphs fill their outputs
    error = rank.fault()
    assert error is not None
    if not broken:
        assert isinstance(error, GroupError)
        assert "rank 1: reset() failed half way" in str(error)


def test_R10b_a_reset_of_a_world_that_is_interrupted_leaves_every_rank_broken(rank):
    def interrupted(generation):
        assert rank._state[mailbox.STATE_BROKEN] == 0  # armed already
        raise KeyboardInterrupt

    told = []
    other = SimpleNamespace(generation=lambda: 9, arm=interrupted, break_down=lambda: told.append("other"))
    world = CudaWorld.__new__(CudaWorld)
    world._device, world.engines = rank.device, [rank, other]
    with pytest.raises(KeyboardInterrupt):
        world.reset()
    assert rank._state[mailbox.STATE_BROKEN] == RESET_FAILED
    assert isinstance(rank.fault(), GroupError)
    assert told == ["other"]


@pytest.mark.parametrize("more_us", [-1, 400_000])  # the device may round down what the host rounds up
@pytest.mark.parametrize("timeout_s", [0.5, 4294.9, 100_000.0])
def test_R10_a_wait_of_hours_is_told_whole(rank, timeout_s, more_us):
    waited_us = int(timeout_s * 1e6) + more_us
    rank.options = Options(timeout_s=timeout_s)
    rank.memory.local().zero_()
    rank._fault_words[:] = (FAULT_TIMEOUT, 1, 0, 7, 1, 2, waited_us % 2**32, 0)
    error = rank.fault()
    assert isinstance(error, PeerTimeoutError)
    assert error.waited_s == waited_us / 1e6


@pytest.mark.parametrize("resident", [1, 4])
def test_R9_every_kernel_is_loaded_before_the_first_call_and_fits_as_counted(rank, monkeypatch, resident):
    loaded = []
    jit = SimpleNamespace(
        compile_kernel=lambda kernel, *args, key: key[0].access_bytes,
        preload=loaded.append,
        resident_ctas_per_sm=lambda kernel: resident,
    )
    for module in (engine_module, mailbox_kernel):
        monkeypatch.setattr(module, "jit", jit)
    rank.multicast, rank.world_size, rank._checks, rank._delayed = False, 2, False, False
    if resident < 4:  # R8 counts on four
        with pytest.raises(UnsupportedError, match="holds 1 CTAs of the all-gather on a multiprocessor; wanted 4"):
            rank._compile(16)
        return
    assert [rank._compile(width) for width in (16, 8, 1)] == [16, 8, 1]
    assert loaded == [16, 8, 1]
