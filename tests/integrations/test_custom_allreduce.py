# SPDX-License-Identifier: Apache-2.0
"""`CustomAllreduce` between processes (allreduce_ranks.py), and what it does when its communicator breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvcomm.errors import PeerTimeoutError
from nvcomm.integrations import custom_allreduce

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("allreduce_ranks.py")


def run(world_size, device):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        + [str(PROGRAM), device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert done.stdout.count("all steps passed") == world_size, said[-4000:]


def test_on_the_cpu():
    run(3, "cpu")


@pytest.mark.gpu
def test_on_a_gpu():
    run(4, "cuda")


def test_a_broken_communicator_ends_its_worker(monkeypatch, caplog):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    error = PeerTimeoutError(0, 2, generation=7, slot=1, word=0, waited_s=1.0)
    custom_allreduce.end_process(custom_allreduce.CustomAllreduce.log, error)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert "rank 0 waited 1.000 s for rank 2" in caplog.text


def test_a_server_waits_longer_unless_told(monkeypatch):
    monkeypatch.delenv("NVCOMM_TIMEOUT_S", raising=False)
    assert custom_allreduce.CustomAllreduce.options()["timeout_s"] == custom_allreduce.SERVER_TIMEOUT_S
    # Also where it is set to the default of everything else.
    monkeypatch.setenv("NVCOMM_TIMEOUT_S", "30")
    assert custom_allreduce.CustomAllreduce.options()["timeout_s"] == 30.0
