# SPDX-License-Identifier: Apache-2.0
"""What a reducing kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from nvcomm.collectives.all_reduce_tree import ELEM_BYTES, Dtype
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Pdl


@dataclass(frozen=True, slots=True)
class ReduceConfig:
    """What an all-reduce or reduce-scatter kernel is compiled for.

    Attributes:
        layout: the mailbox.
        dtype: of the elements.
        access_bytes: width of accesses to input and output, a multiple of the element's.
        multicast: publish with one multicast store instead of one store per rank.
        pdl: see `nvcomm.options.Options`.
        threads: threads of a CTA.
        spin: False makes it a copy: the same loads, stores and clears, with whatever is in the mailbox.
        device_checks: overlapping and differing calls are recorded (R7, R11).
        delayed: publish into the outbox of the delayed transport.
    """

    layout: MailboxLayout
    dtype: Dtype
    access_bytes: int = 16
    multicast: bool = False
    pdl: Pdl = "safe"
    threads: int = 128
    spin: bool = True
    device_checks: bool = False
    delayed: bool = False

    def __post_init__(self) -> None:
        assert self.access_bytes % ELEM_BYTES[self.dtype] == 0
        assert 512 % self.threads == 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit one multiprocessor whatever the compiler does: 1,024 threads of 64 registers, 512 of 128."""
        return (1024 if self.world_size <= 4 else 512) // self.threads
