# SPDX-License-Identifier: Apache-2.0
"""CUDA streams of our own, and the order of eager calls from several of them (docs/mailbox.md R7)."""

from __future__ import annotations

import torch

from nvcomm import driver


class OwnedStream:
    """A non-blocking stream that nothing else uses: torch's pool hands the same 32 streams out again and again."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes torch create the context
            self._handle = driver.call("cuStreamCreate", driver.load().CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            self.stream: torch.cuda.Stream = torch.cuda.ExternalStream(int(self._handle), device=device)  # type: ignore[no-untyped-call]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroys the stream, once its work is done."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            driver.call("cuStreamDestroy", handle)


class CallOrder:
    """Orders each eager call behind the last one, whatever stream it came from.

    While a stream is captured nothing is recorded and nothing waited for: a graph's calls are ordered by the graph,
    and its replays by whoever launches them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: int | None = None

    def enter(self) -> tuple[int, bool]:
        """Before a call: the current stream's handle, and whether the call is eager."""
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            return stream.cuda_stream, False
        if self._last is not None and self._last != stream.cuda_stream:
            stream.wait_event(self._event)
        return stream.cuda_stream, True

    def leave(self, handle: int) -> None:
        """After an eager call on stream `handle`."""
        self._event.record(torch.cuda.current_stream(self._device))
        self._last = handle
