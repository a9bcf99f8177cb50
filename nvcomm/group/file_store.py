# SPDX-License-Identifier: Apache-2.0
"""What torch's FileStore does with a file that ends inside a record, as a full disk or a file size limit leaves it.

Every call that reads it, and the store's own destructor, then reads at the end of the file again and again, for ever,
at full speed, and holds a lock that other processes' writes wait for. (Seen with torch 2.13.)
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch.distributed as dist


def never_destroy(store: dist.Store) -> None:
    """Keeps a FileStore that failed until the process has ended: its destructor might not return."""
    if _file_of(store) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


def why_stuck(store: dist.Store) -> str:
    """For people: why a call of `store` may not return, or may fail, and what to do."""
    path = _file_of(store)
    if path is None:
        return (
            "Find out whether the process that serves the store runs and can be reached: rank 0's, or torchrun's agent."
        )
    return (
        f"If {path} ends inside a record, as after a full disk, torch reads it for ever: end every process that uses "
        "it, and start again with a new file where there is room."
    )


def _file_of(store: dist.Store) -> str | None:
    """The file below `store`, if it is a FileStore or a prefix of one."""
    below: Any = store  # PyTorch's type stubs do not know the attributes
    while isinstance(below, dist.PrefixStore):
        below = below.underlying_store
    is_file = isinstance(below, dist.FileStore)
    return str(below.path) if is_file else None
