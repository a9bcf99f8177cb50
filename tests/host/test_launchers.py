# SPDX-License-Identifier: Apache-2.0
"""torchrun and mpiexec start the examples, and with either one failing rank ends them all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvcomm import launch
from nvcomm.errors import UsageError
from nvcomm.group import started_by

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
WAIT_S = 200.0  # that no rank waits; a busy machine takes long to start three of them

FAILING = f"""
import sys, torch, nvcomm
from nvcomm.launch import launched
with launched() as (group, device), nvcomm.Communicator(group, device, timeout_s={WAIT_S}) as comm:
    x = torch.ones(4, device=device)
    comm.all_gather(x)
    if comm.rank == 1 and sys.argv[1] == "raises":
        raise ValueError("nothing to send\\nand a second line")
    if comm.rank == 1:
        sys.exit("no reason to go on")
    comm.all_gather(x)
    print("not reached", flush=True)
"""


def command(launcher, world_size):
    """The launcher's words, up to the program; skips where the launcher is not installed."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    # mpich's wheel puts mpiexec beside the interpreter, which need not be in PATH.
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpiexec = shutil.which("mpiexec", path=beside)
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec (the extra `mpi`, and an MPI)")
    words = [mpiexec, "-n", str(world_size)]
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    return [*words, *(["--oversubscribe"] if "Open MPI" in version else []), sys.executable]


def run(launcher, world_size, program, *arguments):
    # Nor many queues for each rank: GPU ranks that share one would not get their contexts.
    apart = (*LAUNCHER_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in apart}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        [*command(launcher, world_size), str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
@pytest.mark.parametrize(
    ("example", "world_size", "shows"),
    [
        ("01_all_gather.py", 4, ["4 ranks on", "gathered (4, 6, 8), sum 6"]),
        ("05_torch_compile.py", 2, ["compiled, 2 ranks: every value is 3"]),
        ("03_missing_rank.py", 3, ["rank 0 was told", "rank 1 was told", "rank 2 did not come", "all 3 ranks gather"]),
    ],
)
def test_examples(launcher, example, world_size, shows):
    done = run(launcher, world_size, EXAMPLES / example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in shows if text not in done.stdout] == []


RAISED = ["[rank 1] ValueError: nothing to send", "[rank 1] and a second line"]


@pytest.mark.parametrize(
    ("launcher", "how", "lines"),
    [
        ("torchrun", "raises", RAISED),
        ("mpiexec", "raises", RAISED),
        ("mpiexec", "exits", ["[rank 1] exit: no reason to go on"]),
    ],
)
def test_one_failing_rank_ends_all(launcher, how, lines, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAILING)
    started = time.monotonic()
    done = run(launcher, 3, program, how)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert [line for line in lines if line not in done.stderr.splitlines()] == [], said
    assert "not reached" not in said
    # The others were ended while they waited: nobody's wait ran out.
    assert "PeerTimeoutError" not in said
    assert time.monotonic() - started < WAIT_S


def test_what_a_reader_has_not_taken_from_a_pipe_is_seen(tmp_path):
    read, write = os.pipe()
    assert launch._unread(write) == 0
    os.write(write, b"last words")
    assert launch._unread(write) == 10
    os.read(read, 4)
    assert launch._unread(write) == 6
    os.read(read, 6)
    assert launch._unread(write) == 0
    os.close(read)
    os.close(write)
    assert launch._unread(write) == 0
    with (tmp_path / "file").open("w") as file:
        file.write("x")
        file.flush()
        assert launch._unread(file.fileno()) == 0


def test_torchrun_counts_before_mpi(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert started_by() is None
    with pytest.raises(UsageError, match="torchrun or mpiexec"), launch.launched():
        pytest.fail("no launcher started this process")
    monkeypatch.setenv("PMI_RANK", "0")
    assert started_by() == "mpi"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert started_by() == "torchrun"


SPLIT = """
import torch, nvcomm
from mpi4py import MPI
world = MPI.COMM_WORLD
with nvcomm.Communicator(device="cpu") as comm, nvcomm.Communicator(world.Split(world.rank % 2), "cpu") as half:
    x = torch.tensor(comm.rank)
    assert comm.all_gather(x).tolist() == [0, 1, 2, 3]
    assert half.all_gather(x).tolist() == [comm.rank % 2, comm.rank % 2 + 2]
    world.Barrier()
"""


def test_mpi_ranks_by_default_and_by_communicator(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SPLIT)
    done = run("mpiexec", 4, program)
    assert done.returncode == 0, done.stdout + done.stderr
