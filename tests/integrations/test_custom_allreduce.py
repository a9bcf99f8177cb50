# SPDX-License-Identifier: Apache-2.0
"""`CustomAllreduce` between processes (allreduce_ranks.py), and what it does when its communicator breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nvcomm import worlds
from nvcomm.errors import CapabilityError, PeerTimeoutError, UnsupportedError
from nvcomm.integrations import custom_allreduce
from nvcomm.mailbox import MAX_WORLD_SIZE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def run(world_size, program, *words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        + [str(HERE / program), *words],
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
    run(3, "allreduce_ranks.py", "cpu")


def test_several_groups_and_odd_inputs():
    run(4, "allreduce_groups.py")


@pytest.mark.gpu
def test_on_a_gpu():
    run(4, "allreduce_ranks.py", "cuda")


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


@pytest.mark.parametrize("error", [CapabilityError("rank 1: [device] no GPU"), UnsupportedError("not an x86-64")])
def test_where_it_cannot_be_used_it_is_off(one_rank, monkeypatch, caplog, error):
    """On every rank alike; a server then goes on without."""

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(custom_allreduce, "Communicator", refuse)
    ar = custom_allreduce.CustomAllreduce(one_rank, "cpu")
    assert ar.disabled
    assert ar.custom_all_reduce(torch.ones(8)) is None
    assert f"nvcomm is off: {error}" in caplog.text
    ar.close()


def test_more_ranks_than_there_are_kernels_for(one_rank, monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: MAX_WORLD_SIZE + 1)
    ar = custom_allreduce.CustomAllreduce(one_rank, "cpu")
    assert ar.disabled
    assert "nvcomm is off: 9 ranks; it takes up to 8" in caplog.text


def test_without_a_compiler_gpus_are_refused_and_cpus_are_not(one_rank, monkeypatch):
    """A plugin is active where it is installed: a GPU machine without the DSL must not lose its server to it."""
    monkeypatch.setitem(sys.modules, "nvcomm.collectives.world", None)
    monkeypatch.setattr(worlds, "resolve_device", torch.device)
    with pytest.raises(UnsupportedError, match=r"cannot be imported here .*: pip install 'nvcomm\[cu13\]'"):
        worlds.build_world(1, torch.device("cuda", 0), None)
    group = custom_allreduce.Communicator(one_rank, "cpu")
    group.close()
    with pytest.raises(CapabilityError, match="GPU tensors need the CuTe DSL"):
        custom_allreduce.Communicator(one_rank, "cuda:0")
