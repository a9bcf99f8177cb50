# SPDX-License-Identifier: Apache-2.0
"""From what a kernel recorded to the error that a caller sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from nvcomm import mailbox
from nvcomm.device import FAULT_MISMATCH, FAULT_OVERLAP
from nvcomm.errors import CollectiveMismatchError, GroupError, NvcommError
from nvcomm.host import headers
from nvcomm.host.faults import Fault
from nvcomm.mailbox import MailboxLayout

RESET_FAILED = 4  # beside the kinds that kernels record: written by the host


def kind_of(operation: str, dtype: torch.dtype) -> int:
    """The first two header words of a call as kernels take them: operation below, dtype above."""
    words = headers.encode(headers.Call(operation, str(dtype).removeprefix("torch."), 0, 0, 0))
    fields = words & np.uint32(headers.MAX_TAG)
    return int(fields[0]) | int(fields[1]) << 16


def fault_error(fault: Fault, layout: MailboxLayout, words: torch.Tensor, timeout_s: float) -> NvcommError:
    """The error for `fault`.

    Args:
        fault: this rank's own record.
        layout: of the mailbox.
        words: this rank's mailbox, int32; its fault rows and headers are copied to the host.
        timeout_s: of this rank's waits.
    """
    if fault.kind == FAULT_OVERLAP:
        return CollectiveMismatchError(
            f"rank {fault.rank}: two calls overlapped on one communicator (its launches {fault.generation} and "
            f"{fault.slot}): streams or graphs that run at the same time need a communicator each. Call reset() on "
            "every rank."
        )
    if fault.kind == FAULT_MISMATCH:
        mine, theirs = (_header(layout, words, fault.slot, rank) for rank in (fault.rank, fault.src_rank))
        return CollectiveMismatchError(
            f"ranks made different calls: rank {fault.rank} {mine}; rank {fault.src_rank} {theirs}. All must make the "
            "same calls in the same order. Correct that, then call reset() on every rank."
        )
    if fault.kind == RESET_FAILED:
        return GroupError(
            f"rank {fault.rank}: reset() failed half way. Build a new communicator, on a group of the ranks left."
        )
    # The device has 32 bits for microseconds, 71 minutes; who timed out has waited a little longer than the timeout.
    wraps = max(round((timeout_s * 1e6 - fault.waited_us) / 2**32), 0)
    fault = replace(fault, waited_us=fault.waited_us + wraps * 2**32)
    rows = words[layout.faults_base // mailbox.WORD_BYTES :].cpu().numpy().view(np.uint32)
    return fault.timeout_error(rows.reshape(-1, mailbox.FAULT_WORDS))


def _header(layout: MailboxLayout, words: torch.Tensor, slot: int, rank: int) -> str:
    start = layout.header_offset(slot, rank) // mailbox.WORD_BYTES
    header = words[start : start + mailbox.HEADER_WORDS].cpu().numpy().view(np.uint32)
    return str(headers.decode(header))
