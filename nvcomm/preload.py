# SPDX-License-Identifier: Apache-2.0
"""Load the GPU functions behind a launch, launching nothing (docs/jit.md, "Loading")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nvcomm import driver
from nvcomm.errors import CudaError, UsageError


def load_functions_of(launch: Callable[[int], object]) -> int:
    """Captures `launch(stream)` into a graph, loads every function in it and throws it away.

    May wait for the device: call it before anything spins there.

    Returns:
        The number of functions loaded.

    Raises:
        UsageError: no CUDA context is current.
        CudaError: a driver call failed; stream and graph are given back all the same.
    """
    if int(driver.call("cuCtxGetCurrent")) == 0:
        raise UsageError("preload needs a current CUDA context: call torch.cuda.set_device(device) first.")
    loaded = 0
    for function, _ in _functions(launch):
        driver.call("cuFuncLoad", function)
        loaded += 1
    return loaded


def resident_ctas_of(launch: Callable[[int], object]) -> int:
    """CTAs of the kernels in `launch(stream)` that one multiprocessor holds at once: the fewest, says the driver.

    Loads them too; for the rest see `load_functions_of`.
    """
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    resident = []
    for function, params in _functions(launch):
        threads = params.blockDimX * params.blockDimY * params.blockDimZ
        resident.append(int(driver.call(name, function, threads, params.sharedMemBytes)))
    return min(resident)


def _functions(launch: Callable[[int], object]) -> Iterator[tuple[Any, Any]]:
    """Each kernel of a launch that is captured and thrown away: its function, and its node's parameters."""
    cuda = driver.load()
    with _stream(cuda) as stream, _captured(cuda, stream, launch) as graph:
        for node in _nodes(graph):
            if driver.call("cuGraphNodeGetType", node) == cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                params = driver.call("cuGraphKernelNodeGetParams", node)
                function = params.func if int(params.func) else driver.call("cuKernelGetFunction", params.kern)
                yield function, params


@contextlib.contextmanager
def _stream(cuda: Any) -> Iterator[Any]:
    stream = driver.call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        yield stream
    finally:
        driver.call("cuStreamDestroy", stream)


@contextlib.contextmanager
def _captured(cuda: Any, stream: Any, launch: Callable[[int], object]) -> Iterator[Any]:
    # Relaxed: the DSL loads its library inside the capture, which the other modes may call unsafe.
    driver.call("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        launch(int(stream))
    except BaseException:
        # The launch's own error counts, not that its capture has become invalid.
        with contextlib.suppress(CudaError):
            driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", stream))
        raise
    graph = driver.call("cuStreamEndCapture", stream)
    try:
        yield graph
    finally:
        driver.call("cuGraphDestroy", graph)


def _nodes(graph: Any) -> list[Any]:
    _, count = driver.call("cuGraphGetNodes", graph, 0)
    nodes, count = driver.call("cuGraphGetNodes", graph, count)
    return list(nodes[:count])
