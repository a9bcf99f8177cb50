# SPDX-License-Identifier: Apache-2.0
"""The logger `nvcomm`: silent unless NVCOMM_DEBUG asks for it, and never the root logger."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from nvcomm.env import settings
from nvcomm.errors import UsageError

TRACE = 5
_LEVELS = {"WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": TRACE}

logging.addLevelName(TRACE, "TRACE")
logger = logging.getLogger("nvcomm")
if not logger.handlers:  # a package that is imported again finds the same logger
    logger.addHandler(logging.NullHandler())


def configure(rank: int | None = None) -> None:
    """Attaches the handler that NVCOMM_DEBUG and NVCOMM_DEBUG_FILE ask for; one for each target.

    Every communicator calls it as it is built, and commands that compile.

    Args:
        rank: this process's rank, shown in every line and for %r in the file's name; None where there is none.

    Raises:
        UsageError: the file cannot be written.
    """
    wanted = settings()
    if wanted.debug is None:
        return
    target = _expand(wanted.debug_file, rank) if wanted.debug_file else "stderr"
    logger.setLevel(_LEVELS[wanted.debug])
    handler = next((one for one in logger.handlers if one.get_name() == target), None)
    if handler is None:
        handler = _open(target) if wanted.debug_file else logging.StreamHandler()
        handler.set_name(target)
        logger.addHandler(handler)
    elif rank is None:  # whoever opened it knew more
        return
    who = "-" if rank is None else f"rank {rank}"
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who:>7}] %(levelname)-7s %(message)s"))


def _open(target: str) -> logging.Handler:
    try:
        return logging.FileHandler(Path(target))
    except OSError as error:
        raise UsageError(
            f"NVCOMM_DEBUG_FILE: {target} cannot be written ({error.strerror}). Name a file in a folder that exists."
        ) from error


def _expand(pattern: str, rank: int | None) -> str:
    known = {"%h": socket.gethostname(), "%p": str(os.getpid()), "%r": "none" if rank is None else str(rank)}
    for mark, value in known.items():
        pattern = pattern.replace(mark, value)
    return pattern
