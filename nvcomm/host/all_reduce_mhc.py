# SPDX-License-Identifier: Apache-2.0
"""The sublayer boundary between CPU ranks: an all-reduce, then the mixing, in one call or in two halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from nvcomm.errors import NvcommError, UnsupportedError, UsageError
from nvcomm.host import headers
from nvcomm.host.all_reduce import all_reduce, choose
from nvcomm.host.all_reduce_mhc_math import boundary, finalize
from nvcomm.host.reduce import sum_of, without_reserved
from nvcomm.host.steps import FILL, Row, Steps
from nvcomm.host.tensors import input_bytes, output_bytes
from nvcomm.host.waiting import Waiting
from nvcomm.host.words import Bytes
from nvcomm.mailbox import CHUNK_BYTES, WORD_BYTES

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce_mhc_checks import BoundaryTensors, ExpertTensors
    from nvcomm.collectives.all_reduce_mhc_config import PublishTarget

# operation, its tensor, its result, what to do
Run = Callable[[str, torch.Tensor, Bytes, Callable[[headers.Call], None]], None]


class HostBoundary:
    """`nvcomm.collectives.all_reduce_mhc.Boundary` of one CPU rank.

    Args:
        run: makes one call of the engine.
        steps: the engine's steps, which a reset replaces.
    """

    def __init__(self, run: Run, steps: Callable[[], Steps]) -> None:
        self._run = run
        self._steps = steps
        self._published_tag = 0

    def fused(self, x: torch.Tensor, tensors: BoundaryTensors, protocol: str) -> None:
        """All of it, from a contribution; outputs are 0xFF bytes if a rank does not come."""
        steps = self._steps()
        chosen = choose(protocol, x.nbytes, steps.port.world_size)
        y = torch.empty_like(x)
        payload, result = input_bytes(x, x.nbytes), output_bytes(y, x.nbytes)

        def body(call: headers.Call) -> None:
            all_reduce(steps, payload, result, call, x.dtype, chosen)

        self._finish(f"all_reduce_mhc {chosen}", x, result, body, y, tensors)

    def finalize(self, experts: ExpertTensors, tensors: BoundaryTensors, protocol: str) -> None:
        """All of it, from a MoE output in expert order."""
        x = finalize(experts.experts, experts.weights, experts.indices, experts.shared)
        self.fused(x, tensors, protocol)

    def publish(self, x: torch.Tensor) -> None:
        """The first half: sends a contribution to all, and waits for nobody."""
        steps = self._steps()
        words = without_reserved(steps.pad(input_bytes(x, x.nbytes)))

        def body(call: headers.Call) -> None:
            port = steps.port
            self._published_tag = call.tag
            steps.begin(call)
            for dst_rank in steps.destinations():
                steps.send(dst_rank, steps.row_words(port.mailboxes[dst_rank], port.rank, len(words)), words)

        self._run("all_reduce_mhc ll", x, np.zeros(0, np.uint8), body)

    def collect(self, tensors: BoundaryTensors) -> None:
        """The second half, after `publish`."""
        steps = self._steps()
        rows, _, hidden = tensors.residual.shape
        y = tensors.residual.new_empty(rows, hidden)
        result = output_bytes(y, y.nbytes)
        num_words = -(-y.nbytes // CHUNK_BYTES) * CHUNK_BYTES // WORD_BYTES

        def body(call: headers.Call) -> None:
            port, waiting = steps.port, Waiting(steps.timeout_s())
            steps.compare_headers(replace(call, tag=self._published_tag), waiting)  # as its header was published
            contributions = np.empty((port.world_size, num_words * WORD_BYTES), np.uint8)
            sources = [Row(r, steps.row_words(port.own, r, num_words), contributions[r]) for r in steps.sources()]
            steps.collect(sources, waiting)
            result[:] = sum_of(contributions, y.dtype)[: len(result)]
            steps.advance(len(result))

        self._finish("all_reduce_mhc ll", y, result, body, y, tensors)

    def target(self) -> PublishTarget:
        """Not on a CPU: there is no kernel that could publish."""
        raise UnsupportedError("publish_target: CPU ranks have no kernels that publish; call publish(x).")

    def _finish(
        self,
        operation: str,
        x: torch.Tensor,
        result: Bytes,
        body: Callable[[headers.Call], None],
        y: torch.Tensor,
        tensors: BoundaryTensors,
    ) -> None:
        try:
            self._run(operation, x, result, body)
        except UsageError:  # nothing was sent, and an output may be the input that the caller still has
            raise
        except NvcommError:
            for out in (tensors.new_residual, tensors.h):
                if out is not None:
                    output_bytes(out, out.nbytes)[...] = FILL
            raise
        new_residual, h = boundary(
            y, tensors.residual, tensors.post, tensors.comb, tensors.pre, tensors.norm_weight, tensors.eps
        )
        tensors.new_residual.copy_(new_residual)
        if tensors.h is not None and h is not None:
            tensors.h.copy_(h)
