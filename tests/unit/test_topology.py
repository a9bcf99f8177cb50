# SPDX-License-Identifier: Apache-2.0
"""What the driver says, with a driver that is stood in for: facts, every call failing once, and no driver at all."""

from __future__ import annotations

import enum
import types

import pytest

from nvcomm import driver, topology
from nvcomm.errors import CudaError, UnsupportedError
from nvcomm.topology import Unknown


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_UNKNOWN = 999


class FakeDriver:
    """Two GPUs of 132 multiprocessors that reach each other; `failing` is the name of a function that fails."""

    ATTRIBUTES = {
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 10,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 3,
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
        "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 50 << 20,
        "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED": 1,
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    }

    def __init__(self, failing=None):
        self.failing = failing
        self.called = []
        self.context = 0
        self.CUdevice_attribute = types.SimpleNamespace(**{name: name for name in self.ATTRIBUTES})

    def __getattr__(self, name):
        answers = {
            "cuInit": lambda flags: (),
            "cuDriverGetVersion": lambda: (13010,),
            "cuDeviceGetCount": lambda: (2,),
            "cuDeviceGet": lambda index: (index,),
            "cuDeviceGetUuid": lambda device: (types.SimpleNamespace(bytes=bytes([device] * 16)),),
            "cuDeviceGetName": lambda size, device: (b"GPU of a test\0\0\0",),
            "cuDeviceTotalMem": lambda device: (1 << 37,),
            "cuDeviceGetAttribute": lambda attribute, device: (self.ATTRIBUTES[attribute],),
            "cuDeviceCanAccessPeer": lambda device, peer: (1,),
            "cuCtxGetCurrent": lambda: (self.context,),
            "cuCtxGetDevice": lambda: (1,),
        }
        if name not in answers:
            raise AttributeError(name)

        def function(*args):
            self.called.append(name)
            if name == self.failing:
                return (Result.CUDA_ERROR_UNKNOWN, *(None for _ in answers[name](*args)))
            return (Result.CUDA_SUCCESS, *answers[name](*args))

        return function


READS = (
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceCanAccessPeer",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuDeviceTotalMem",
)


def test_facts_of_every_device():
    first, second = topology.devices(FakeDriver())
    assert (first.index, second.index) == (0, 1)
    assert first.uuid == "00" * 16
    assert second.uuid == "01" * 16
    assert first.name == "GPU of a test"
    assert first.arch == "sm_103a"
    assert first.num_sms == 132
    assert first.multicast is True
    assert first.peers == (1,)
    assert second.peers == (0,)
    assert topology.driver_version(FakeDriver()) == 13010


def test_it_creates_nothing():
    fake = FakeDriver()
    topology.devices(fake)
    topology.current_arch(fake)
    assert all(name.startswith(READS) for name in fake.called), fake.called


def test_arch_is_that_of_the_current_context_and_has_the_suffix_from_hopper_on():
    fake = FakeDriver()
    assert topology.current_arch(fake) == "sm_103a"
    fake.context = 7
    assert topology.current_arch(fake) == "sm_103a"
    assert "cuCtxGetDevice" in fake.called
    fake.ATTRIBUTES = fake.ATTRIBUTES | {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 8}
    assert topology.current_arch(fake) == "sm_83"


@pytest.mark.parametrize(
    "failing",
    ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceGetName", "cuDeviceTotalMem",
     "cuDeviceGetAttribute", "cuDeviceCanAccessPeer"],
)  # fmt: skip
def test_every_call_that_fails_is_named(failing):
    with pytest.raises(CudaError) as caught:
        topology.device(0, FakeDriver(failing))
    assert (caught.value.call, caught.value.name, caught.value.code) == (failing, "CUDA_ERROR_UNKNOWN", 999)
    answer = topology.devices(FakeDriver(failing))
    assert isinstance(answer, Unknown)
    assert failing in answer.reason


def test_no_driver_is_an_answer_with_a_reason():
    class Missing:
        def __getattr__(self, name):
            raise RuntimeError('Failed to dlopen "libcuda.so.1"')

    for ask in (topology.devices, topology.driver_version, topology.current_arch):
        answer = ask(Missing())
        assert isinstance(answer, Unknown)
        assert "libcuda" in answer.reason
        assert "driver installed" in answer.reason
    with pytest.raises(UnsupportedError, match="libcuda"):
        topology.device(0, Missing())


def test_no_bindings_is_an_answer_with_a_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    answer = topology.devices()
    assert isinstance(answer, Unknown)
    assert "pip install" in answer.reason


def test_a_driver_that_is_too_old_for_a_function():
    with pytest.raises(UnsupportedError, match="cuFuncLoad"):
        driver.call("cuFuncLoad", 0, driver=FakeDriver())


@pytest.mark.gpu
def test_real_facts_agree_with_pytorch():
    import torch

    facts = topology.devices()
    assert len(facts) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    assert facts[0].num_sms == properties.multi_processor_count
    assert facts[0].memory_bytes == properties.total_memory
    assert facts[0].uuid == str(properties.uuid).replace("-", "")
    assert facts[0].arch.startswith(f"sm_{properties.major}{properties.minor}")
    assert topology.current_arch() == facts[torch.cuda.current_device()].arch
