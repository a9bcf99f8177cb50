# SPDX-License-Identifier: Apache-2.0
"""SGLang's plugin, as far as it goes without SGLang: a registry of hooks like its own, and how it builds the class."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

from nvcomm.integrations import sglang
from nvcomm.integrations.custom_allreduce import CustomAllreduce

ROOT = Path(__file__).parents[2]
# What SGLang's groups and graph runners call.
INTERFACE = ("should_custom_ar", "custom_all_reduce", "capture", "register_graph_buffers", "close")


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """Takes hooks as SGLang's registry does, and puts them around functions."""

    hooks: dict[str, list] = {}

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls.hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls.hooks.items():
            module, _, name = target.rpartition(".")
            original = getattr(sys.modules[module], name)
            for hook_type, hook in hooks:
                assert hook_type is HookType.AROUND
                setattr(sys.modules[module], name, functools.partial(hook, original))


@pytest.fixture
def runtime(monkeypatch):
    """The modules of SGLang that the plugin touches."""
    HookRegistry.hooks = {}
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    home = types.ModuleType("sglang.srt.distributed.device_communicators.custom_all_reduce")
    home.dispatch_custom_allreduce = lambda *args, **kwargs: "SGLang's own"
    for module in (registry, home):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return home


def gpus_of(maker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: maker is not None)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if maker == "NVIDIA" else None)


def test_the_hook_replaces_the_class(runtime, one_rank, monkeypatch):
    gpus_of("NVIDIA", monkeypatch)
    sglang.register()
    assert [len(hooks) for hooks in HookRegistry.hooks.values()] == [1]
    HookRegistry.apply_hooks()
    # Older versions ask without arguments, newer ones with the group and the device.
    assert runtime.dispatch_custom_allreduce() is sglang.SglangAllreduce
    chosen = runtime.dispatch_custom_allreduce(group=one_rank, device="cpu")
    built = chosen(group=one_rank, device="cpu")
    assert built.disabled  # one rank alone has nothing to reduce
    with built.capture():
        assert built.custom_all_reduce is not None
    built.close()


@pytest.mark.parametrize("maker", ["AMD", None])
def test_other_platforms_keep_the_class_that_sglang_chooses(runtime, one_rank, monkeypatch, maker):
    gpus_of(maker, monkeypatch)
    sglang.register()
    HookRegistry.apply_hooks()
    assert runtime.dispatch_custom_allreduce(group=one_rank, device="cuda:0") == "SGLang's own"


def test_the_class_has_what_sglang_calls():
    assert [name for name in INTERFACE if not callable(getattr(CustomAllreduce, name, None))] == []
    parameters = list(inspect.signature(CustomAllreduce).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["group", "device", "max_size"]
    assert all(parameter.default is not parameter.empty for parameter in parameters[2:])


def test_the_entry_point_is_the_function():
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry_points["sglang.srt.plugins"] == {"nvcomm": f"{sglang.register.__module__}:register"}
