# SPDX-License-Identifier: Apache-2.0
"""How every reducing kernel begins and ends, and what it says of its call (docs/mailbox.md R1, R6, R7, R11)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from nvcomm import device
from nvcomm.collectives import all_reduce_turn as turn
from nvcomm.device import Mailbox
from nvcomm.device_checks import CallWords, exchange_headers, leave_busy, take_busy
from nvcomm.outbox import post
from nvcomm.ptx import memory as ptx


@cute.jit
def begin(
    config: cutlass.Constexpr,
    trigger: cutlass.Constexpr,
    state: Int64,
    fault_record: Int64,
    rank: Int32,
    thread: Int32,
    call: CallWords,
) -> None:
    """Waits for the kernel before this one, and triggers the next if `trigger` says so (R1 i, iii)."""
    if const_expr(config.pdl != "off"):
        cute.arch.griddepcontrol_wait()
        if const_expr(trigger):
            cute.arch.griddepcontrol_launch_dependents()
    if const_expr(config.device_checks):
        take_busy(state, fault_record, rank, thread, call)


def open_box(
    config: Any,
    rank: Int32,
    peers: list[Int64],
    multicast_ptr: Int64,
    state: Int64,
    fault_record: Int64,
    timeout_ns: Int64,
    slot: Uint32,
    generation: Uint32,
) -> Mailbox:
    """The mailboxes as this rank sees them in this call."""
    outbox = device.outbox_of(state) if config.delayed else None
    return Mailbox(
        config.layout, config.multicast, rank, tuple(peers), multicast_ptr, state, fault_record, timeout_ns, slot,
        generation, outbox,
    )  # fmt: skip


def send_words(box: Mailbox, k: int, offset: Int64, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes into the mailbox of the k-th rank after this one, alone."""
    if box.outbox is None:
        ptx.st_relaxed_sys_v4(box.peers[k] + offset, words)
    else:
        post(box.outbox, box.peers[k] + offset, words)


@cute.jit
def compare(
    config: cutlass.Constexpr, box: Mailbox, call: CallWords, first_warp: Boolean, live: Boolean, wait: cute.Tensor
) -> None:
    """With device checks, the first warp of the grid compares what the ranks call (R11)."""
    if const_expr(config.device_checks):  # noqa: SIM102 - this one is decided while the kernel is traced
        if first_warp & live:
            exchange_headers(box, call, wait)


@cute.jit
def end(
    config: cutlass.Constexpr,
    state: Int64,
    slot: Uint32,
    generation: Uint32,
    num_bytes: Int32,
    last: Boolean,
    broken: Uint32,
    thread: Int32,
    num_ctas: Int32,
) -> None:
    """Steps to the next generation, and lets the next kernel go (R1 ii) unless that has been done early."""
    turn.step(state, slot, generation, num_bytes, last, broken)
    if const_expr(config.device_checks):
        leave_busy(state, thread, num_ctas)
    if const_expr(config.pdl != "early"):
        turn.release(thread, config.pdl == "safe")
