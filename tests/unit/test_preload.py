# SPDX-License-Identifier: Apache-2.0
"""Preload with a driver that is stood in for: every call fails once, and nothing is left behind."""

from __future__ import annotations

import types

import pytest

from nvcomm import driver, preload
from nvcomm.errors import CudaError, UsageError

KERNEL, MEMSET = "kernel node", "memset node"


class FakeDriver:
    """Counts what lives. The graph holds two kernels, one known by its context-free handle, and a memset."""

    def __init__(self, failing=None):
        self.failing, self.calls, self.live, self.loaded, self.capturing = failing, [], set(), [], False
        self.context = 1
        self.CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        self.CUgraphNodeType = types.SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL)

    def call(self, name, *args):
        self.calls.append(name)
        if name == self.failing:
            if name == "cuStreamEndCapture":
                self.capturing = False
            raise CudaError(999, "CUDA_ERROR_UNKNOWN", name)
        return getattr(self, name)(*args)

    def cuCtxGetCurrent(self):
        return self.context

    def cuStreamCreate(self, flags):
        self.live.add("stream")
        return 77

    def cuStreamDestroy(self, stream):
        assert not self.capturing, "the stream is destroyed while it captures"
        self.live.remove("stream")

    def cuStreamBeginCapture(self, stream, mode):
        self.capturing = True

    def cuStreamEndCapture(self, stream):
        assert self.capturing
        self.capturing = False
        self.live.add("graph")
        return "graph"

    def cuGraphDestroy(self, graph):
        self.live.remove("graph")

    def cuGraphGetNodes(self, graph, count):
        # The driver's list may be longer than what it has filled in.
        return (["a", "b", "c", None][: count + 1], 3) if count else ([], 3)

    def cuGraphNodeGetType(self, node):
        return {"a": KERNEL, "b": MEMSET, "c": KERNEL}[node]

    def cuGraphKernelNodeGetParams(self, node):
        return types.SimpleNamespace(
            func=5 if node == "a" else 0,
            kern=f"kernel {node}",
            **{"blockDimX": 64, "blockDimY": 2, "blockDimZ": 1, "sharedMemBytes": 1024},
        )

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem_bytes):
        assert (threads, smem_bytes) == (128, 1024)
        return 4 if function == 5 else 3

    def cuKernelGetFunction(self, kernel):
        return f"function of {kernel}"

    def cuFuncLoad(self, function):
        self.loaded.append(function)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "call", fake.call)
    monkeypatch.setattr(driver, "load", lambda: fake)
    return fake


def test_every_kernel_of_the_graph_is_loaded_and_nothing_else(fake):
    streams = []
    assert preload.load_functions_of(streams.append) == 2
    assert streams == [77]
    assert fake.loaded == [5, "function of kernel c"]
    assert not fake.live


FALLIBLE = [
    "cuCtxGetCurrent",
    "cuStreamCreate",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams",
    "cuKernelGetFunction",
    "cuFuncLoad",
]


@pytest.mark.parametrize("failing", FALLIBLE)
def test_a_call_that_fails_is_named_and_nothing_is_left(fake, failing):
    fake.failing = failing
    with pytest.raises(CudaError, match=failing):
        preload.load_functions_of(lambda stream: None)
    assert not fake.live
    assert not fake.capturing


def test_every_call_but_the_two_that_give_back_is_made_to_fail(fake):
    preload.load_functions_of(lambda stream: None)
    assert set(fake.calls) - {"cuStreamDestroy", "cuGraphDestroy"} == set(FALLIBLE)


@pytest.mark.parametrize("also_failing", [None, "cuStreamEndCapture"])
def test_a_launch_that_fails_is_the_error_that_is_seen(fake, also_failing):
    fake.failing = also_failing

    def launch(stream):
        raise ValueError("argument #4")

    with pytest.raises(ValueError, match="argument #4"):
        preload.load_functions_of(launch)
    assert not fake.live
    assert not fake.capturing


def test_residency_is_that_of_the_kernel_with_the_fewest(fake):
    assert preload.resident_ctas_of(lambda stream: None) == 3
    assert not fake.live
    fake.failing = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    with pytest.raises(CudaError, match="cuOccupancy"):
        preload.resident_ctas_of(lambda stream: None)
    assert not fake.live


def test_without_a_context_the_error_says_what_to_call(fake):
    fake.context = 0
    with pytest.raises(UsageError, match="set_device"):
        preload.load_functions_of(lambda stream: None)
