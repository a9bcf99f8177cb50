# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels: what is read from it is run, so it is the user's own or it is refused.

The folder is opened once per operation and checked through its descriptor: a real directory, owned by this user, mode
0700. Entries are reached through that descriptor alone, so swapping the path underneath changes nothing. An entry is
a digest, then the object; it is written under another name and renamed, so a reader sees all of it or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from nvcomm.errors import UsageError

MAGIC = b"nvcomm-kernel/1\n"
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
# No kernel of ours comes near; it bounds what a damaged file can make us read.
MAX_ENTRY_BYTES = 64 << 20

log = logging.getLogger("nvcomm.jit")


class KernelCache:
    """Entries by name in one folder.

    Args:
        path: the folder; it and its parents are created at the first use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str) -> bytes | None:
        """The object stored as `name`, or None: absent, or damaged (then it is removed, and a warning is logged).

        Raises:
            UsageError: the folder or the entry belongs to, or can be written by, somebody else.
        """
        with self._folder() as folder:
            try:
                entry = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise UsageError(f"{self.path / name} cannot be read ({error}). Remove it.") from error
            with os.fdopen(entry, "rb") as file:
                self._check_owner(os.fstat(entry), self.path / name, stat.S_ISREG)
                content = file.read(MAX_ENTRY_BYTES + 1)
            body = content[HEADER_BYTES:]
            if content[:HEADER_BYTES] == _header(body):
                return body
            log.warning("%s is damaged: it is removed and compiled again", self.path / name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            return None

    def store(self, name: str, body: bytes) -> None:
        """Stores `body` as `name`, atomically. A full or read-only disk costs the next process a compile: a warning.

        Raises:
            UsageError: the folder belongs to, or can be written by, somebody else.
        """
        temporary = f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        with self._folder() as folder:
            try:
                entry = os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
                )
                with os.fdopen(entry, "wb") as file:
                    file.write(_header(body) + body)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                log.warning("%s cannot be written (%s): the next process compiles it again", self.path / name, error)
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)

    def exists(self, name: str) -> bool:
        """Whether there is an entry or dump called `name`."""
        with self._folder() as folder:
            try:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def write_text(self, name: str, text: str) -> None:
        """Writes a dump for people (PTX, SASS) beside the entries; it is never read back."""
        with self._folder() as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(text)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"the kernel cache {self.path} cannot be used ({error}). Set NVCOMM_CACHE_DIR to a folder that you own."
            ) from error
        try:
            self._check_owner(os.fstat(folder), self.path, stat.S_ISDIR)
            yield folder
        finally:
            os.close(folder)

    def _check_owner(self, seen: os.stat_result, path: Path, is_kind: object) -> None:
        mode, user = stat.S_IMODE(seen.st_mode), os.geteuid()
        wanted_mode = 0o700 if is_kind is stat.S_ISDIR else 0o600
        if seen.st_uid != user:
            raise UsageError(
                f"{path} belongs to user {seen.st_uid}, not to {user}: what it holds would be run as you. "
                f"Set NVCOMM_CACHE_DIR to a folder that you own."
            )
        if mode & 0o077 or not is_kind(seen.st_mode):  # type: ignore[operator]
            raise UsageError(
                f"{path} has mode {mode:04o}, wanted {wanted_mode:04o}: others could reach kernels that run as you. "
                f"Run `chmod {wanted_mode:o} {path}` if nobody else wrote there, else remove it."
            )


def _header(body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(body).digest()
