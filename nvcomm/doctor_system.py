# SPDX-License-Identifier: Apache-2.0
"""Rows about the operating system: what the host world and the compile cache stand on. Looks, and creates nothing."""

from __future__ import annotations

import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from nvcomm.doctor_rows import Probe, Row
from nvcomm.mailbox import MAX_WORLD_SIZE, MailboxLayout

# Every rank makes one, and maps all: of a communicator with default options and as many ranks as there can be.
_MAILBOX_BYTES = MailboxLayout(MAX_WORLD_SIZE, 4 << 20).size_bytes
_FEW_DESCRIPTORS = 256
_MAX_SOCKET_PATH_BYTES = 107 - len("/nvcomm-12345678/symm_mem-4194304")


def _python() -> Iterator[Row]:
    found = f"{platform.python_version()} at {sys.executable}"
    old = sys.version_info < (3, 11)
    yield Row("system", "Python", "FAIL" if old else "OK", found, "install Python 3.11 or newer" if old else "")


def _machine() -> Iterator[Row]:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {cpu_name()}"
    if platform.system() != "Linux":
        yield Row("system", "platform", "FAIL", found, "use Linux: mailboxes are memfds, and the driver's are too")
    elif platform.machine() not in {"x86_64", "AMD64"}:
        fix = "use GPU worlds here; the host world needs x86-64, whose processors keep stores in order"
        yield Row("system", "platform", "WARN", found, fix)
    else:
        yield Row("system", "platform", "OK", found)


def cpu_name() -> str:
    """The name of the processor, for people."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def _cores() -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        yield Row(
            "system", "CPU cores", "WARN", str(cores), "give the process more: CPU ranks poll, each on its own core"
        )
    else:
        yield Row("system", "CPU cores", "OK", f"{cores} usable by this process")


def _shared_memory() -> Iterator[Row]:
    import fcntl
    import socket

    lacking = [
        name
        for name, there in {
            "memfd_create": hasattr(os, "memfd_create"),
            "file seals": hasattr(fcntl, "F_ADD_SEALS"),
            "AF_UNIX": hasattr(socket, "AF_UNIX"),
            "descriptor passing": hasattr(socket, "send_fds"),
        }.items()
        if not there
    ]
    noexec = _text("/proc/sys/vm/memfd_noexec") or "0"
    if lacking:
        fix = "use a Python built for Linux with these; without them there is no host world"
        yield Row("system", "memfd, AF_UNIX", "FAIL", f"missing: {', '.join(lacking)}", fix)
    elif noexec.strip() == "2":
        fix = "sysctl vm.memfd_noexec=1: at 2 the kernel refuses the memfds of the host world"
        yield Row("system", "memfd, AF_UNIX", "FAIL", "vm.memfd_noexec=2", fix)
    else:
        yield Row("system", "memfd, AF_UNIX", "OK", f"offered by Python; vm.memfd_noexec={noexec.strip()}")
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield Row("system", "/dev/shm", "WARN", f"{error}", "mount it; nvcomm does without, NCCL and PyTorch do not")
        return
    size = room.f_blocks * room.f_frsize
    small = size < 1 << 30
    fix = (
        "start the container with --shm-size=1g or more, for NCCL and PyTorch; nvcomm does not use it" if small else ""
    )
    yield Row(
        "system",
        "/dev/shm",
        "WARN" if small else "OK",
        f"{_mib(size)}, {_mib(room.f_bavail * room.f_frsize)} free",
        fix,
    )


def _memory() -> Iterator[Row]:
    lines = dict(line.split(":", 1) for line in (_text("/proc/meminfo") or "").splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        yield Row("system", "memory", "WARN", "/proc/meminfo does not say", "mount /proc")
        return
    free = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit and used and limit.strip().isdigit():
        free = min(free, int(limit) - int(used))
    little = free < MAX_WORLD_SIZE * _MAILBOX_BYTES
    fix = "give Communicator a smaller max_bytes, or the process more memory" if little else ""
    yield Row("system", "memory", "WARN" if little else "OK", f"{_mib(free)} available (with the cgroup's limit)", fix)


def _limits() -> Iterator[Row]:
    import resource

    def shown(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else str(value)

    def row(name: str, limit: int, least: int, status: str, fix: str) -> Row:
        soft, hard = resource.getrlimit(limit)
        bad = soft != resource.RLIM_INFINITY and soft < least
        found = f"{shown(soft)} (hard {shown(hard)})"
        return Row("system", name, status if bad else "OK", found, fix if bad else "")  # type: ignore[arg-type]

    few = f"ulimit -n {_FEW_DESCRIPTORS} or more: a rank opens one for each peer while ranks meet"
    yield row("ulimit -n (files)", resource.RLIMIT_NOFILE, _FEW_DESCRIPTORS, "WARN", few)
    small = "ulimit -f unlimited: it bounds a memfd as well, and so a mailbox"
    yield row("ulimit -f (file size)", resource.RLIMIT_FSIZE, _MAILBOX_BYTES, "FAIL", small)
    space = "ulimit -v unlimited: CUDA reserves addresses for all memory it may ever map"
    yield row("ulimit -v (addresses)", resource.RLIMIT_AS, 1 << 44, "WARN", space)


def _tmpdir() -> Iterator[Row]:
    from nvcomm.env import other

    # Not tempfile.gettempdir(): it writes a file to see whether it can.
    folder = next((path for path in (other("TMPDIR"), "/tmp", "/var/tmp") if path and Path(path).is_dir()), None)
    if folder is None:
        yield Row("system", "TMPDIR", "FAIL", "no folder for temporary files", "set TMPDIR to a folder of yours")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Row("system", "TMPDIR", "FAIL", f"{folder} cannot be written", "set TMPDIR to a folder of yours")
    elif len(os.fsencode(folder)) > _MAX_SOCKET_PATH_BYTES:
        fix = f"set TMPDIR to a path of at most {_MAX_SOCKET_PATH_BYTES} bytes: GPU ranks meet at a socket in it"
        yield Row("system", "TMPDIR", "WARN", folder, fix)
    else:
        yield Row("system", "TMPDIR", "OK", folder)


def _cache() -> Iterator[Row]:
    from nvcomm.env import settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = settings().cache_dir
    try:
        seen = path.stat()
    except FileNotFoundError:
        parent = next(each for each in path.parents if each.exists())
        if path.is_symlink():
            yield Row("system", "kernel cache", "FAIL", f"{path} is a link to nothing", f"remove it: rm {path}")
        elif os.access(parent, os.W_OK | os.X_OK):
            yield Row("system", "kernel cache", "OK", f"{path}, not there yet: made when a kernel is compiled")
        else:
            fix = "set NVCOMM_CACHE_DIR to a folder of yours"
            yield Row("system", "kernel cache", "FAIL", f"{path} is not there, and {parent} cannot be written", fix)
        return
    except OSError as error:  # HOME is somebody else's, as in a container that runs as another user
        fix = "set NVCOMM_CACHE_DIR to a folder of yours"
        yield Row("system", "kernel cache", "FAIL", f"{path} cannot be reached: {error.strerror}", fix)
        return
    mode = stat.S_IMODE(seen.st_mode)
    found = f"{path}, mode {mode:04o}, owner {seen.st_uid}"
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        fix = "set NVCOMM_CACHE_DIR to a folder of yours: what it holds is run as you"
        yield Row("system", "kernel cache", "FAIL", found, fix)
    elif mode & 0o077:
        fix = f"if nobody else wrote there: chmod 700 {path}; else remove it"
        yield Row("system", "kernel cache", "FAIL", found, fix)
    else:
        sizes = [entry.stat().st_size for entry in path.iterdir() if entry.is_file()]
        yield Row("system", "kernel cache", "OK", f"{found}, {len(sizes)} entries, {_mib(sum(sizes))}")


def _variables() -> Iterator[Row]:
    from nvcomm import env
    from nvcomm.errors import UsageError

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            env.settings()
        except UsageError as error:
            yield Row("system", "NVCOMM_* variables", "FAIL", str(error), "change or unset it")
            return
    known = {variable.name for variable in env.VARIABLES}
    # The library warns once a process only; here it counts every time.
    unknown = sorted(name for name in os.environ if name.startswith(env.PREFIX) and name not in known)
    if unknown or caught:
        told = ", ".join(unknown) or str(caught[0].message)
        yield Row("system", "NVCOMM_* variables", "WARN", f"unknown: {told}", "nvcomm list shows those that there are")
    else:
        count = sum(env.is_set(name) for name in known)
        yield Row("system", "NVCOMM_* variables", "OK", f"{count} set")


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


PROBES: dict[str, Probe] = {
    "Python": _python,
    "platform": _machine,
    "CPU cores": _cores,
    "shared memory": _shared_memory,
    "memory": _memory,
    "limits": _limits,
    "TMPDIR": _tmpdir,
    "kernel cache": _cache,
    "NVCOMM_* variables": _variables,
}
