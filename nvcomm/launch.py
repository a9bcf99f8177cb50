# SPDX-License-Identifier: Apache-2.0
"""For programs whose ranks a launcher starts: torchrun, or mpiexec with mpi4py. One failing rank ends them all.

torchrun --nproc-per-node 4 program.py
mpiexec -n 4 python program.py
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nvcomm.env import other
from nvcomm.group import DEFAULT_TIMEOUT_S, StoreGroup, from_environment, from_mpi, started_by
from nvcomm.group.mpi import mpi_world

# What mpiexec may take to read a rank's last lines, and to hand on what it has read.
_READ_S, _HAND_ON_S = 5.0, 0.2


class Launched(NamedTuple):
    """One process of a launcher.

    Attributes:
        group: its ranks, for `Communicator`.
        device: this rank's GPU, which is the current one; the CPU where there is none.
    """

    group: StoreGroup
    device: torch.device


@contextmanager
def launched(timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[Launched]:
    """The ranks that torchrun or mpiexec started, as a context. Collective.

    A rank that fails inside the block, by an exception or by `sys.exit` with anything but 0, prints its traceback with
    its rank before each line, and every process of the launcher ends with a code other than 0: torchrun ends the others
    as soon as one is gone, MPI is told to abort.

    Args:
        timeout_s: bound of the wait for the others at the start.

    Raises:
        UsageError: no launcher started this process.
        GroupError: a rank did not answer in time.

    Example:
        >>> with launched() as (group, device), nvcomm.Communicator(group, device) as comm:
        ...     y = comm.all_gather(x)
    """
    if started_by() == "mpi":
        yield from _under_mpi(timeout_s)
        return
    group = from_environment(timeout_s)
    try:
        # Programs start seconds apart on a busy machine; what follows may be in more of a hurry.
        group.barrier("nvcomm/launched", timeout_s)
        yield Launched(group, _device(int(other("LOCAL_RANK") or group.rank)))
    except BaseException as error:
        if not _failed(error):
            raise
        _tell(group.rank, error)
        # The agent of torchrun sees the code. What would print the traceback a second time is passed over.
        raise SystemExit(1) from None


def _under_mpi(timeout_s: float) -> Iterator[Launched]:
    world = mpi_world()
    from mpi4py import MPI  # which is there

    try:
        group = from_mpi(world, timeout_s)
        on_host = world.Split_type(MPI.COMM_TYPE_SHARED)
        yield Launched(group, _device(on_host.Get_rank()))
        # Rank 0 serves the store of the group: it stays until the last one is done.
        world.Barrier()
    except BaseException as error:
        if not _failed(error):
            raise
        _tell(world.Get_rank(), error)
        # mpiexec drops what it has not yet read of a rank's output when the rank aborts.
        _wait_for_the_reader()
        # Without it MPI's own end would wait for ranks that wait for this one.
        world.Abort(1)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _wait_for_the_reader() -> None:
    """Returns once somebody has read what this process wrote, where its output is a pipe, and a moment later."""
    deadline = time.monotonic() + _READ_S
    while (_unread(1) or _unread(2)) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(_HAND_ON_S)


def _unread(descriptor: int) -> int:
    """Bytes that are still in a pipe; 0 of anything else."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
    return 0


def _failed(error: BaseException) -> bool:
    return not (isinstance(error, SystemExit) and error.code in (None, 0))


def _tell(rank: int, error: BaseException) -> None:
    lines = [f"exit: {error.code}"] if isinstance(error, SystemExit) else traceback.format_exception(error)
    sys.stdout.flush()
    # One write, so that the lines of ranks that fail together stay apart.
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for part in lines for line in part.splitlines()))
    sys.stderr.flush()
