# SPDX-License-Identifier: Apache-2.0
"""The plugin inside a real vLLM on the CPU: found, registered, its interface, its groups, its tokens.

`make test-vllm` sets an environment up and runs these; without vLLM they skip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nvcomm.integrations import vllm as plugin

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: `make test-vllm` brings one for the CPU"
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMUNICATORS = "vllm.distributed.device_communicators"


@pytest.fixture
def homes(monkeypatch):
    """vLLM's modules of the two classes, put back afterwards."""
    found = {kind: importlib.import_module(home) for kind, (home, _) in plugin.HOMES.items()}
    for kind, (_, name) in plugin.HOMES.items():
        monkeypatch.setattr(found[kind], name, getattr(found[kind], name))
    return found


def run(*words, **variables):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_vllm_finds_the_plugin():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    if not entry_points(group=DEFAULT_PLUGINS_GROUP, name="nvcomm"):
        pytest.skip("nvcomm is not installed here: `pip install --no-deps .`")
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["nvcomm"] is plugin.register


def test_registering_again_changes_nothing(homes):
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from nvcomm.integrations.vllm_cpu import NvcommCpuCommunicator

    for _ in range(3):
        plugin.register()
        # This is how vLLM comes to the class.
        assert resolve_obj_by_qualname(current_platform.get_device_communicator_cls()) is NvcommCpuCommunicator
    assert NvcommCpuCommunicator.__mro__.count(NvcommCpuCommunicator) == 1
    assert homes["cuda"].CustomAllreduce.__module__ == f"{COMMUNICATORS}.custom_all_reduce"


def test_on_gpus_the_custom_all_reduce_is_replaced(homes, monkeypatch):
    import vllm.platforms

    from nvcomm.integrations.vllm_allreduce import VllmAllreduce

    class Cuda:
        is_cpu = staticmethod(lambda: False)
        is_cuda = staticmethod(lambda: True)

    monkeypatch.setattr(vllm.platforms, "current_platform", Cuda)
    plugin.register()
    plugin.register()
    # CudaCommunicator imports this name in its constructor.
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    assert CustomAllreduce is VllmAllreduce


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_interface_method_by_method(homes, kind):
    module, name = plugin.OURS[kind]
    theirs = getattr(homes[kind], plugin.HOMES[kind][1])
    ours = getattr(importlib.import_module(module), name)
    assert plugin.differences(theirs, ours) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda theirs: setattr(theirs, "fused", lambda self: None), "fused is missing"),
        (lambda theirs: setattr(theirs, "capture", lambda self, stream: None), "capture: no argument stream"),
        (
            lambda theirs: setattr(theirs, "all_reduce", lambda self, out, inp, *, registered=False: None),
            "all_reduce: arguments in the order",
        ),
        (lambda theirs: setattr(theirs, "custom_all_reduce", lambda self: None), "custom_all_reduce: needs input"),
    ],
)
def test_another_interface_is_left_alone(homes, monkeypatch, caplog, change, message):
    """The control of the test above: a vLLM whose class has changed keeps it, and says why."""
    import vllm.platforms

    monkeypatch.setattr(
        vllm.platforms, "current_platform", type("Cuda", (), {"is_cpu": lambda: False, "is_cuda": lambda: True})
    )
    original = homes["cuda"].CustomAllreduce
    theirs = type("CustomAllreduce", (), {name: vars(original)[name] for name in vars(original) if name != "__dict__"})
    change(theirs)
    homes["cuda"].CustomAllreduce = theirs
    monkeypatch.setattr(plugin.log, "propagate", True)
    monkeypatch.setattr(plugin.log.parent, "propagate", True)
    plugin.register()
    assert homes["cuda"].CustomAllreduce is theirs
    assert message in caplog.text


def test_vllm_reads_no_other_attribute(one_rank):
    """Whatever vLLM's code asks of a `ca_comm` is there; the files about AITER's own class do not count."""
    from nvcomm.integrations.vllm_allreduce import VllmAllreduce

    package = Path(importlib.util.find_spec("vllm").origin).parent
    asked = set()
    for path in package.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "ca_comm" in text and "get_aiter_allreduce" not in text:
            asked |= set(re.findall(r"\bca_comm\.(\w+)|\bcomm\.(mnnvl_\w+)", text))
    names = {name for pair in asked for name in pair if name}
    assert {"disabled", "should_custom_ar", "custom_all_reduce", "capture", "mnnvl_lamport_ag_multicast_ptr"} <= names
    ours = VllmAllreduce(one_rank, "cpu")
    assert [name for name in sorted(names) if not hasattr(ours, name)] == []


@pytest.mark.timeout(950)
def test_operations_of_a_group():
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, HERE / "vllm_groups.py")
    assert run(*words, OMP_NUM_THREADS="1", VLLM_PLUGINS=None).count("all steps passed") == 2


@pytest.mark.timeout(1900)
def test_tokens_are_those_without_the_plugin(tmp_path):
    """Two servers' worth of processes: ours, and the example without the plugin, on the same model and prompts."""
    with_plugin = run(HERE / "vllm_generate.py", tmp_path, VLLM_PLUGINS="nvcomm")
    assert "nvcomm carries the collectives of 2 ranks on cpu" in with_plugin
    ours = json.loads((tmp_path / "report.json").read_text())
    assert ours["calls"][0] == ours["calls"][1] > 0
    without = run(ROOT / "examples" / "04_vllm.py", tmp_path, VLLM_PLUGINS="")
    assert "nvcomm carries" not in without
    assert f"\ntokens {ours['tokens']}\n" in without
    # Sums count: without one rank's share the tokens are others.
    assert ours["control"] != ours["tokens"]
