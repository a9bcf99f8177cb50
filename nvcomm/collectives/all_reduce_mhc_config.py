# SPDX-License-Identifier: Apache-2.0
"""What a fused all-reduce + mHC kernel is compiled for, and how its threads lie over a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nvcomm.errors import UsageError
from nvcomm.mailbox import CHUNK_BYTES, MailboxLayout
from nvcomm.options import Pdl, is_count

# "fused" does everything, "publish" and "collect" are its halves, "finalize" is "fused" for a MoE output.
MhcPart = Literal["fused", "finalize", "publish", "collect"]
ELEMS_PER_CHUNK = CHUNK_BYTES // 2  # bf16
WARP = 32
MAX_CLUSTER = 8  # CTAs of a cluster that every GPU takes
_THREADS = 128


@dataclass(frozen=True, slots=True)
class MhcShape:
    """Sizes of the model.

    Attributes:
        hidden: values of a row, a multiple of 64.
        num_streams: residual streams (hc).
        top_k: experts of a row, where the MoE output is finalized on the way; else 0.
    """

    hidden: int
    num_streams: int = 4
    top_k: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for a shape that no kernel takes."""
        if not is_count(self.hidden, 64, 65536) or self.hidden % 64:
            raise UsageError(f"hidden is {self.hidden!r}; wanted: a multiple of 64 from 64 to 65536.")
        if not is_count(self.num_streams, 1, 4):
            raise UsageError(f"there are {self.num_streams!r} residual streams; wanted: 1 to 4.")
        if not is_count(self.top_k, 0, 16):
            raise UsageError(f"top_k is {self.top_k!r}; wanted: 0 to 16.")

    def check_parts(self, parts: tuple[str, ...]) -> None:
        """Raises UsageError unless `parts` name kernels that there are for this shape."""
        known = get_args(MhcPart)
        if not parts or not set(parts) <= set(known):
            raise UsageError(f"parts is {parts!r}; wanted one or several of {known}, as a tuple or list.")
        if "finalize" in parts and not self.top_k:
            raise UsageError("parts has 'finalize', which adds up a row's experts: give mhc() their number, top_k.")

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.hidden // ELEMS_PER_CHUNK

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of one stream."""
        return self.hidden * 2


@dataclass(frozen=True, slots=True)
class MhcConfig:
    """What a kernel is compiled for.

    A row is the work of a cluster, a chunk of 16 bytes (8 values of each stream) that of a thread: 5 CTAs of 128
    threads for 5,120 values.

    Attributes:
        layout: the mailbox.
        shape: the model's sizes.
        part: what the kernel does.
        two_shot: whether contributions go to owners, who publish sums; else every rank publishes to all (LL).
        multicast: publish with one multicast store instead of one store per rank.
        pdl: see `nvcomm.options.Options`.
        spin: False makes it a copy: the same loads, stores and clears, with whatever is in the mailbox.
        device_checks: overlapping and differing calls are recorded (R7, R11).
        delayed: publish into the outbox of the delayed transport.
    """

    layout: MailboxLayout
    shape: MhcShape
    part: MhcPart = "fused"
    two_shot: bool = False
    multicast: bool = False
    pdl: Pdl = "safe"
    spin: bool = True
    device_checks: bool = False
    delayed: bool = False

    @property
    def publishes(self) -> bool:
        """Whether the kernel publishes."""
        return self.part != "collect"

    @property
    def collects(self) -> bool:
        """Whether the kernel collects."""
        return self.part != "publish"

    @property
    def cluster(self) -> int:
        """CTAs of a row."""
        return min(MAX_CLUSTER, -(-self.shape.chunks // _THREADS))

    @property
    def threads(self) -> int:
        """Threads of a CTA: enough of them for a chunk each."""
        return -(-self.shape.chunks // (self.cluster * WARP)) * WARP

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit one multiprocessor whatever the compiler does: 512 threads of 128 registers."""
        return max(1, 512 // self.threads)

    @property
    def partial_sums(self) -> int:
        """Warps of a cluster: the partial sums of a row's RMSNorm."""
        return self.cluster * self.threads // WARP


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """Where the kernel that makes a contribution stores it, so that no publish kernel is needed.

    That kernel triggers its dependents, if at all, behind its own `griddepcontrol.wait`: `collect` reads that early.
    Behind it too (or as a plain launch) it reads the slot, the first word of `state`,
    and stores 16 bytes at byte `at = slot * slot_bytes + row_offset + row * row_bytes + column * 2` of every rank's
    mailbox: at `multicast_ptr + at` by `multimem.st.relaxed.sys` if that is not 0, else at `peer + at` for each of
    `peers` by `st.relaxed.sys`. A word that equals EMPTY or ESCAPE (`nvcomm.mailbox`) is sent with its highest bit
    turned over. Every row is stored whole, each 16 bytes once.

    Attributes:
        peers: every rank's mailbox, the own one first.
        multicast_ptr: one address for all of them, or 0.
        state: the rank's state block.
        slot_bytes: bytes from one slot to the next.
        row_offset: bytes to this rank's row of slot 0.
        row_bytes: bytes from one row of the tensor to the next.
    """

    peers: tuple[int, ...]
    multicast_ptr: int
    state: int
    slot_bytes: int
    row_offset: int
    row_bytes: int

    @classmethod
    def of(
        cls, layout: MailboxLayout, shape: MhcShape, rank: int, peers: tuple[int, ...], multicast_ptr: int, state: int
    ) -> PublishTarget:
        """The target of `rank`, whose own mailbox is the first of `peers`."""
        return cls(peers, multicast_ptr, state, layout.slot_bytes, layout.row_offset(0, rank), shape.row_bytes)
