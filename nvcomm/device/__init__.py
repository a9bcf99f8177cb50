# SPDX-License-Identifier: Apache-2.0
"""Publish, collect and clear, for every kernel that touches a mailbox.

The functions are inlined into kernels written in CuTe DSL. Rules R1 to R13 are those of docs/mailbox.md; this package
keeps R2 to R5 and R10, the kernel that calls it keeps R1, R6 and R8.
"""

from nvcomm.device.collect import (
    any_equals,
    clear_chunk,
    collect_chunk,
    collect_word,
    fill_missing,
    load_rows,
    reload_rows,
)
from nvcomm.device.escapes import FILL, restore_escapes
from nvcomm.device.publish import publish_chunk, publish_record, publish_word, publish_words, send_words
from nvcomm.device.view import WARP, Mailbox, outbox_of
from nvcomm.device.wait import (
    FAULT_MISMATCH,
    FAULT_OVERLAP,
    FAULT_TIMEOUT,
    POLLS_PER_CLOCK,
    look_at_clock,
    new_wait,
    report,
)

__all__ = [
    "FAULT_MISMATCH",
    "FAULT_OVERLAP",
    "FAULT_TIMEOUT",
    "FILL",
    "Mailbox",
    "POLLS_PER_CLOCK",
    "WARP",
    "any_equals",
    "clear_chunk",
    "collect_chunk",
    "collect_word",
    "fill_missing",
    "load_rows",
    "look_at_clock",
    "new_wait",
    "outbox_of",
    "publish_chunk",
    "publish_record",
    "publish_word",
    "publish_words",
    "reload_rows",
    "report",
    "restore_escapes",
    "send_words",
]
