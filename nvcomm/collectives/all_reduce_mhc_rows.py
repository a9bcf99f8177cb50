# SPDX-License-Identifier: Apache-2.0
"""The work of a fused kernel, and a thread's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, Int64

from nvcomm.collectives.all_reduce_mhc_config import MhcConfig
from nvcomm.collectives.turn import Place


class Boundary(NamedTuple):
    """The work: addresses and sizes.

    Attributes:
        x: (rows, hidden) bf16, or for "finalize" the experts' outputs (expert rows, hidden) bf16.
        expert_weights, expert_indices, shared: see `ExpertSource`; for "finalize" only.
        residual: (rows, hc, hidden) bf16.
        post, comb: (rows, hc) and (rows, hc source, hc target) fp32.
        pre: (rows, hc) fp32; 0: no collapse, and h is not written.
        norm_weight: (hidden,) bf16.
        new_residual, h: results, (rows, hc, hidden) and (rows, hidden) bf16.
        eps: added to the mean square.
        rows: of this call, not 0.
    """

    x: Int64
    expert_weights: Int64
    expert_indices: Int64
    shared: Int64
    residual: Int64
    post: Int64
    comb: Int64
    pre: Int64
    norm_weight: Int64
    new_residual: Int64
    h: Int64
    eps: Float32
    rows: Int32


@dataclass(frozen=True)
class Share:
    """A thread's share: a chunk of each row that its cluster takes.

    Attributes:
        cta: index of the CTA in its cluster.
        thread: index of the thread in its CTA.
        chunk: its chunk of a row.
        inside: whether a row has so many.
        first: its cluster's first row.
        step: rows from one of them to the next.
    """

    cta: Int32
    thread: Int32
    chunk: Int32
    inside: Boolean
    first: Int32
    step: Int32


def share_of(config: MhcConfig, at: Place) -> Share:
    """The share of the thread at this place of the grid."""
    cta = at.cta % config.cluster
    chunk = cta * config.threads + at.thread
    inside = Boolean(chunk < config.shape.chunks)
    step = at.num_ctas // config.cluster
    return Share(cta, at.thread, chunk, inside, at.cta // config.cluster, step)
