# SPDX-License-Identifier: Apache-2.0
"""The host world between processes; the ranks are those of rank_process.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}


def run(*command: object, limit_s: float = 240.0) -> None:
    done = subprocess.run(
        [str(word) for word in command], env=ENVIRONMENT, timeout=limit_s, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [("gathers", 2), ("gathers", 4), ("killed", 3), ("stopped", 2), ("stopped", 3), ("disagree", 2)],
)
def test_processes(tmp_path, scenario, world_size):
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    run(sys.executable, HERE / "rank_process.py", scenario, world_size, tmp_path / "store")
    left = {name for name in set(os.listdir("/dev/shm")) - before if "nvcomm" in name}  # noqa: PTH208
    assert not left
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


MPI_PROGRAM = """
from mpi4py import MPI
import torch
from nvcomm.group import from_mpi
from nvcomm.host import HostEngine, open_memory
group = from_mpi(MPI.COMM_WORLD)
memory, layout = open_memory(group, 4096, 20.0)
with memory, HostEngine(memory, layout, group, timeout_s=20.0) as engine:
    out = torch.empty(group.world_size, dtype=torch.int32)
    engine.all_gather(torch.tensor([group.rank], dtype=torch.int32), out)
    assert out.tolist() == [0, 1, 2]
    assert engine.audit().dirty_words == 0
    group.barrier("end", 20.0)
"""


def test_ranks_started_by_mpi():
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec (the extra `mpi`, and an MPI)")
    run(mpiexec, "-n", 3, sys.executable, "-c", MPI_PROGRAM)


TORCHRUN_PROGRAM = """
import torch, torch.distributed as dist
from nvcomm.group import as_group
from nvcomm.host import HostEngine, open_memory

def gather():
    group = as_group(None)
    memory, layout = open_memory(group, 4096, 20.0)
    with memory, HostEngine(memory, layout, group, timeout_s=20.0) as engine:
        out = torch.empty(2, dtype=torch.int32)
        engine.all_gather(torch.tensor([group.rank], dtype=torch.int32), out)
        assert out.tolist() == [0, 1]
        assert engine.audit().dirty_words == 0
        group.barrier("end", 20.0)

gather()  # a group of the launcher's store
dist.init_process_group("gloo")
gather()  # of the process group's
"""


def test_ranks_started_by_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN_PROGRAM)
    run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, program)
