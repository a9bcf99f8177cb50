# SPDX-License-Identifier: Apache-2.0
"""A folder of the user's own in which the ranks of one host meet while they exchange memory handles.

PyTorch's sockets lie in it. Whoever could put a socket there could hand a rank a memory handle, so the folder is new,
mode 0700, and every rank checks that it is its own user's.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

# PyTorch copies "<TMPDIR>/symm_mem-<pid>" into the 108 bytes of sockaddr_un without looking at its length.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME = "/symm_mem-4194304"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The same text for all processes of this host, and of no other: its boot."""
    return BOOT_ID.read_text().strip()


class MeetingFolder:
    """One rank's part in it: the first rank of a host creates it and removes it, the others join.

    Attributes:
        path: the folder; the empty path before `create` or `join`.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._mine = False

    def create(self) -> None:
        """Makes the folder.

        Raises:
            OSError: it cannot be made, or its path is too long for a socket.
        """
        self.path = Path(tempfile.mkdtemp(prefix="nvcomm-"))
        self._mine = True
        longest = len(os.fsencode(self.path)) + len(LONGEST_SOCKET_NAME)
        if longest > MAX_SOCKET_PATH_BYTES:
            self.remove()
            raise OSError(
                f"TMPDIR is too long: a socket's path there has {longest} bytes, at most {MAX_SOCKET_PATH_BYTES} fit. "
                f"Set TMPDIR to a shorter one."
            )

    def join(self, path: Path) -> None:
        """Checks the folder that another rank made.

        Raises:
            OSError: it is not there (ranks of one host see different folders), or belongs to or is open to others.
        """
        seen = path.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) != 0o700:
            raise PermissionError(
                f"{path} is not a folder of user {os.geteuid()} with mode 0700 "
                f"(owner {seen.st_uid}, mode {stat.S_IMODE(seen.st_mode):04o}): ranks of one host run as one user."
            )
        self.path = path

    def remove(self) -> None:
        """Removes the folder and what is left in it, if this rank made it. Harmless when called twice."""
        if self._mine:
            self._mine = False
            shutil.rmtree(self.path, ignore_errors=True)
