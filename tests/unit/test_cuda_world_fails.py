# SPDX-License-Identifier: Apache-2.0
"""A world of GPU ranks whose building fails at any step gives back all that it had taken; without a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm import streams
from nvcomm.collectives import delivery as delivery_module
from nvcomm.collectives import engine as engine_module
from nvcomm.collectives import world as world_module
from nvcomm.collectives.world import CudaWorld
from nvcomm.errors import CudaError, UsageError
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Options
from nvcomm.residency import CLAIMS

RANKS = 3
UUID = "GPU-of-a-test"


class Steps:
    """Counts what building takes, lets one step fail, and knows what is still held."""

    def __init__(self, failing=-1):
        self.failing, self.taken, self.held = failing, 0, []

    def take(self, what):
        self.taken += 1
        if self.taken - 1 == self.failing:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", what)
        self.held.append(what)

    def give_back(self, what):
        self.held.remove(what)


def stand_ins(monkeypatch, steps):
    class Memory:
        def __init__(self, rank):
            self.rank = rank

        @classmethod
        def build(cls, world_size, size_bytes, device):
            for rank in range(world_size):
                steps.take("tensor")  # torch frees it with its last reference
                steps.give_back("tensor")
                yield cls(rank)

    class Stream:
        def __init__(self, device):
            steps.take("stream")
            self.stream = SimpleNamespace()

        def close(self):
            steps.give_back("stream")

    class Engine:
        def __init__(self, memory, layout, device, options, *, max_ctas, ranks_on_device):
            steps.take("engine")

        def close(self):
            steps.give_back("engine")

    monkeypatch.setattr(world_module, "refuse_capture", lambda: None)
    monkeypatch.setattr(world_module, "most_ctas", lambda *args: 8)
    monkeypatch.setattr(world_module.topology, "device", lambda index: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name, stand_in in (("VirtualMemory", Memory), ("OwnedStream", Stream), ("DeviceEngine", Engine)):
        monkeypatch.setattr(world_module, name, stand_in)


@pytest.mark.parametrize("failing", range(3 * RANKS))
def test_whatever_step_fails_nothing_is_left(monkeypatch, failing):
    steps = Steps(failing)
    stand_ins(monkeypatch, steps)
    with pytest.raises(CudaError):
        CudaWorld(RANKS, torch.device("cuda:0"), Options())
    assert steps.taken == failing + 1
    assert steps.held == []
    assert CLAIMS.held(UUID) == {}


def test_a_world_that_is_built_holds_all_of_it_until_closed(monkeypatch):
    """The negative control."""
    steps = Steps()
    stand_ins(monkeypatch, steps)
    world = CudaWorld(RANKS, torch.device("cuda:0"), Options(device_share=0.75))
    assert sorted(steps.held) == ["engine"] * RANKS + ["stream"] * RANKS
    assert list(CLAIMS.held(UUID).values()) == [0.75]
    with pytest.raises(UsageError, match="more asks for 0.5"):
        CudaWorld(RANKS, torch.device("cuda:0"), Options(device_share=0.5))
    world.close()
    assert steps.held == []
    assert CLAIMS.held(UUID) == {}


def test_a_stream_that_torch_does_not_take_is_destroyed(monkeypatch):
    calls = []

    def call(name, *args):
        calls.append(name)
        return 7

    flags = SimpleNamespace(CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1))
    monkeypatch.setattr(streams, "driver", SimpleNamespace(call=call, load=lambda: flags))

    def refuse(handle, device):
        raise RuntimeError("no such device")

    cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(), current_stream=lambda: None, ExternalStream=refuse
    )
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(RuntimeError, match="no such device"):
        streams.OwnedStream("cuda:0")
    assert calls == ["cuStreamCreate", "cuStreamDestroy"]


@pytest.mark.parametrize("failing", ["compile", "preload", "stream"])
def test_an_agent_whose_building_fails_leaves_no_stream(monkeypatch, failing):
    held = []

    def maybe(name, value=None):
        if name == failing:
            raise CudaError(1, "CUDA_ERROR_INVALID_VALUE", name)
        return value

    class Stream:
        def __init__(self, device):
            maybe("stream")
            held.append(self)

    jit = SimpleNamespace(compile_kernel=lambda *args, key: maybe("compile"), preload=lambda kernel: maybe("preload"))
    monkeypatch.setattr(delivery_module, "jit", jit)
    monkeypatch.setattr(delivery_module, "OwnedStream", Stream)
    with pytest.raises(CudaError):
        delivery_module.Delivery(torch.device("cpu"), 1)
    assert held == []


@pytest.mark.parametrize("failing", ["_compile", "Reductions", "arm"])
def test_an_engine_whose_building_fails_closes_its_agent(monkeypatch, failing):
    closed = []

    class Delivery:
        ptr = 0

        def __init__(self, device, seed):
            self.close = lambda: closed.append(seed)

    def fails(*args, **options):
        raise CudaError(1, "CUDA_ERROR_INVALID_VALUE", failing)

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(engine_module, "CallOrder", lambda device: None)
    monkeypatch.setattr(engine_module, "Delivery", Delivery)
    monkeypatch.setattr(engine_module, "Reductions", lambda *args, **options: None)
    monkeypatch.setattr(engine_module.DeviceEngine, "_compile", lambda self, width: None)
    monkeypatch.setattr(engine_module if failing == "Reductions" else engine_module.DeviceEngine, failing, fails)
    memory = SimpleNamespace(multicast_ptr=0, rank=1, world_size=2, peer_ptrs=(0, 0))
    with pytest.raises(CudaError, match=failing):
        engine_module.DeviceEngine(
            memory, MailboxLayout(2, 64), torch.device("cpu"), Options(transport="delayed", seed=5), max_ctas=1,
            ranks_on_device=2,
        )  # fmt: skip
    assert closed == [5 * 2 + 1]
