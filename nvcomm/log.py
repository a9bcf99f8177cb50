# SPDX-License-Identifier: Apache-2.0
"""The logger `nvcomm`: silent unless NVCOMM_DEBUG asks for it, and never the root logger."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from nvcomm.env import settings

TRACE = 5
_LEVELS = {"WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": TRACE}

logging.addLevelName(TRACE, "TRACE")
logger = logging.getLogger("nvcomm")
logger.addHandler(logging.NullHandler())


def configure(rank: int | None = None) -> None:
    """Attaches the handler that NVCOMM_DEBUG and NVCOMM_DEBUG_FILE ask for; again with the same target changes nothing.

    Args:
        rank: this process's rank, shown in every line and for %r in the file's name; None before it is known.
    """
    wanted = settings()
    if wanted.debug is None:
        return
    target = _expand(wanted.debug_file, rank) if wanted.debug_file else "stderr"
    logger.setLevel(_LEVELS[wanted.debug])
    if any(handler.get_name() == target for handler in logger.handlers):
        return
    handler = logging.FileHandler(Path(target)) if wanted.debug_file else logging.StreamHandler()
    handler.set_name(target)
    who = "rank ?" if rank is None else f"rank {rank}"
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who:>7}] %(levelname)-7s %(message)s"))
    logger.addHandler(handler)


def _expand(pattern: str, rank: int | None) -> str:
    known = {"%h": socket.gethostname(), "%p": str(os.getpid()), "%r": "none" if rank is None else str(rank)}
    for mark, value in known.items():
        pattern = pattern.replace(mark, value)
    return pattern
