# SPDX-License-Identifier: Apache-2.0
"""How a command ends that somebody interrupts, or whose output nobody reads any more; codes as a shell has them."""

from __future__ import annotations

import os
import sys

# 128 and the number of the signal.
EXIT_INTERRUPTED, EXIT_NO_READER = 130, 141


def no_reader() -> int:
    """The exit code after a BrokenPipeError: the reader of standard output is gone, as `head` goes.

    Python flushes once more when it ends, and would complain: what is left goes nowhere.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_NO_READER
