# SPDX-License-Identifier: Apache-2.0
"""Captured graphs through the CUDA driver: launching one costs a single call, and uploading is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nvcomm import driver
from nvcomm.errors import CudaError


class Graph:
    """What a function launched on a stream, ready to be launched again and again on that stream.

    Args:
        stream: where it is captured and launched.
        body: launches the work; it may neither allocate nor wait for the device.
    """

    def __init__(self, stream: torch.cuda.Stream, body: Callable[[], None]) -> None:
        cuda = driver.load()
        self._stream = cuda.CUstream(stream.cuda_stream)
        self._exec: Any = None
        with torch.cuda.stream(stream):
            # Thread-local: the watchdog's thread may ask the device things meanwhile.
            mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            driver.call("cuStreamBeginCapture", self._stream, mode)
            try:
                body()
            finally:
                graph = driver.call("cuStreamEndCapture", self._stream)
        try:
            self._exec = driver.call("cuGraphInstantiate", graph, 0)
        finally:
            driver.call("cuGraphDestroy", graph)
        driver.call("cuGraphUpload", self._exec, self._stream)

    def launcher(self) -> Callable[[], None]:
        """A function that launches the graph, as cheap as Python allows."""
        launch, exec_, stream, success = driver.load().cuGraphLaunch, self._exec, self._stream, 0

        def call() -> None:
            (result,) = launch(exec_, stream)
            if result != success:
                raise CudaError(int(result), result.name, "cuGraphLaunch")

        return call

    def close(self) -> None:
        """Destroys the graph; it must not be running."""
        exec_, self._exec = self._exec, None
        if exec_ is not None:
            driver.call("cuGraphExecDestroy", exec_)
