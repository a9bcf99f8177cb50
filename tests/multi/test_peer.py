# SPDX-License-Identifier: Apache-2.0
"""The peer world: a process per rank, started by torchrun and by mpiexec; see peer_gathers.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "multi" / "peer_gathers.py")


def run(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    # One queue a rank is enough, and four MPS clients with 32 each do not get their contexts.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_peers_under_torchrun(world_size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    assert run([*command, PROGRAM]).count("all steps passed") == world_size


@pytest.mark.gpu
def test_peers_under_mpi():
    pytest.importorskip("mpi4py")
    launcher = shutil.which("mpiexec") or shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpiexec on this machine")
    flags = ["--oversubscribe"] if "Open MPI" in version(launcher) else []
    assert run([launcher, *flags, "-n", "3", sys.executable, PROGRAM]).count("all steps passed") == 3


def version(launcher):
    return subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
