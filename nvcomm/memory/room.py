# SPDX-License-Identifier: Apache-2.0
"""Whether there is room for shared memory. Linux grants more than it has, and kills a process once that is written."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
_COUNTED = ("MemAvailable", "SwapFree")
_GIB = 1 << 30


def too_little(wanted_bytes: int) -> str | None:
    """Why this host has no room for so many bytes, or None: it has, or does not tell what it has."""
    try:
        fields = dict(line.partition(":")[::2] for line in MEMINFO.read_text().splitlines())
        left_bytes = sum(1024 * int(fields[name].split()[0]) for name in _COUNTED)
    except (OSError, KeyError, ValueError, IndexError):
        return None
    if wanted_bytes <= left_bytes:
        return None
    return (
        f"the mailboxes of all ranks take {wanted_bytes / _GIB:.3g} GiB, and this host has {left_bytes / _GIB:.3g} GiB "
        "left: lower max_bytes."
    )
