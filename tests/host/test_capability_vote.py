# SPDX-License-Identifier: Apache-2.0
"""The vote between processes: a probe that raises, a rank that is killed, an allocation that fails, other versions.

`python test_capability_vote.py SCENARIO WORLD_SIZE STORE` is one run: it imports torch once and forks a rank each.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

import nvcomm
from nvcomm.capability import Requirement, check
from nvcomm.errors import CapabilityError, GroupError
from nvcomm.group import StoreGroup
from tests.host.forked import run_scenario

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
GONE_S = 4.0  # for a rank that is gone: longer than one that is there may be late


def same_refusal(group, work):
    """`work()` raises the same CapabilityError on every rank; returns it. Nothing stays open or mapped."""
    descriptors = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(CapabilityError) as caught:
        work()
    error = caught.value
    told = group.exchange(
        "told", {"text": str(error), "reasons": {str(r): t for r, t in error.reasons.items()}}, LIMIT_S
    )
    assert all(each == told[0] for each in told), told
    del caught
    assert sorted(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    assert "memfd:nvcomm" not in Path("/proc/self/maps").read_text()
    return error


def gathers(group):
    """The group is as good as before: a communicator on it gathers."""
    with nvcomm.Communicator(group, "cpu", max_bytes=4096, timeout_s=LIMIT_S) as comm:
        assert comm.all_gather(torch.tensor([group.rank])).flatten().tolist() == list(range(group.world_size))
        assert comm.audit().dirty_words == 0
        group.barrier("end", LIMIT_S)


def probe_raises(group):
    def probe():
        if group.rank == 1:
            raise OSError(5, "the probe broke")

    error = same_refusal(group, lambda: check([Requirement("a thing", "device", "rank", probe)], group, LIMIT_S))
    assert error.reasons == {1: ["[device] a thing: OSError: [Errno 5] the probe broke"]}
    gathers(group)


def killed(group):
    """Rank 1 dies inside its probe, before the vote; the others name it, in time."""

    survivors = None if group.rank == 1 else StoreGroup(group._store, group.rank // 2, 2, "survivors")

    def probe():
        if survivors is None:
            os.kill(os.getpid(), signal.SIGKILL)
        survivors.barrier("probed", LIMIT_S)

    started = time.monotonic()
    with pytest.raises(GroupError) as caught:
        check([Requirement("a thing", "device", "rank", probe)], group, GONE_S)
    assert caught.value.missing == (1,)
    assert GONE_S <= time.monotonic() - started < LIMIT_S


def allocation_fails(group):
    """The kernel refuses rank 1 a mailbox: no rank has a communicator; once it may, all have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank == 1:
        # less than a mailbox; more than the group's store, which is a file too and loses its readers if it is cut off
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    error = same_refusal(group, lambda: nvcomm.Communicator(group, "cpu", timeout_s=LIMIT_S))
    assert list(error.reasons) == [1]
    assert "File too large" in error.reasons[1][0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gathers(group)


def versions_differ(group):
    real = metadata.version
    metadata.version = lambda name: "0.0.1" if (name, group.rank) == ("torch", 1) else real(name)
    error = same_refusal(group, lambda: check([], group, LIMIT_S))
    told = same_refusal(group, lambda: nvcomm.Communicator(group, "cpu", timeout_s=LIMIT_S))
    assert str(told) == str(error)
    metadata.version = real
    assert error.reasons[1] == ["version of torch=0.0.1"]
    assert f"version of torch: rank 0: {real('torch')}, rank 1: 0.0.1" in str(error)
    gathers(group)


def config_differs(group):
    error = same_refusal(group, lambda: nvcomm.Communicator(group, "cpu", max_bytes=4096 << (group.rank == 1)))
    assert "max_bytes: rank 0: 4096, rank 1: 8192" in str(error)
    gathers(group)


def a_device_is_missing(group):
    """Rank 1 alone has no GPU, or a device of another kind: nobody waits for it until a deadline."""
    error = same_refusal(group, lambda: nvcomm.Communicator(group, "meta" if group.rank == 1 else "cpu"))
    assert error.reasons == {1: ["device is meta; wanted: a CUDA device or the CPU."]}
    if not torch.cuda.is_available():
        error = same_refusal(group, lambda: nvcomm.Communicator(group, "cuda:0" if group.rank == 1 else "cpu"))
        assert "device is cuda:0, and PyTorch finds no CUDA GPU here" in error.reasons[1][0]
    if importlib.util.find_spec("cutlass") is not None:  # without it a GPU is refused for that
        torch.cuda.is_available = lambda: True
        error = same_refusal(group, lambda: nvcomm.Communicator(group, "cuda:0" if group.rank == 1 else "cpu"))
        assert "rank 0: cpu, rank 1: cuda, rank 2: cpu" in str(error)
    gathers(group)


SCENARIOS = {
    each.__name__: each
    for each in (probe_raises, killed, allocation_fails, versions_differ, config_differs, a_device_is_missing)
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rank_ends_alike(tmp_path, scenario):
    done = subprocess.run(
        [sys.executable, __file__, scenario, "3", str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(run_scenario(SCENARIOS))
