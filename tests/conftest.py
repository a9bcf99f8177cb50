# SPDX-License-Identifier: Apache-2.0
"""What every test needs: the environment before a CUDA context exists, skips with a reason, a seed that is printed."""

from __future__ import annotations

import contextlib
import functools
import os
import random

import pytest

# The device has 8 hardware queues by default; virtual ranks wait for each other, so each needs its own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Tests create no multicast object unless the caller asks for it by setting all three himself.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

# In the environment, so that the workers of pytest-xdist have the same one.
_SEED = int(os.environ.setdefault("PYTEST_SEED", str(random.SystemRandom().randrange(1 << 31))))


@pytest.hookimpl(tryfirst=True)  # before the plugin of Hypothesis reads it
def pytest_configure(config: pytest.Config) -> None:
    """Examples of Hypothesis come from the run's seed too, and may take as long as a busy machine makes them take."""
    if getattr(config.option, "hypothesis_seed", "") is None:
        config.option.hypothesis_seed = str(_SEED)
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile-all", action="store_true", help="compile every variant of every kernel")
    parser.addoption("--model-all", action="store_true", help="also search what takes the explorer minutes")


def pytest_report_header() -> str:
    return f"seed: PYTEST_SEED={_SEED}; GPUs: {_gpu_state()[1] or _gpu_state()[0]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        options = {name: config.getoption(f"--{name.replace('_', '-')}") for name in ("compile_all", "model_all")}
        reason = _skip_reason(item, **options)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: the GPU belongs to one process, as its tests count on being alone (R8); without one, two at a time."""
    return 0 if _gpu_state()[0] else min(2, os.cpu_count() or 1)


@pytest.fixture
def seed() -> int:
    """The run's seed; PYTEST_SEED repeats it."""
    return _SEED


@functools.cache
def _gpu_state() -> tuple[int, str]:
    """Number of GPUs, and why there are none."""
    try:
        import torch
    except ImportError as error:
        return 0, f"torch does not import: {error}"
    if not torch.cuda.is_available():
        return 0, "no CUDA GPU on this machine (torch.cuda.is_available() is False)"
    return torch.cuda.device_count(), ""


def _skip_reason(item: pytest.Item, *, compile_all: bool, model_all: bool = False) -> str | None:
    if item.get_closest_marker("compile_all") and not compile_all:
        return "a variant of the full compile matrix: runs with --compile-all"
    if item.get_closest_marker("model_all") and not model_all:
        return "a search that takes minutes: runs with --model-all"
    wanted = _gpus_wanted(item)
    if not wanted:
        return None
    num_gpus, why_none = _gpu_state()
    if num_gpus < wanted:
        return why_none or f"needs {wanted} GPUs, this machine has {num_gpus}"
    if item.get_closest_marker("sm90"):
        import torch

        if torch.cuda.get_device_capability()[0] != 9:
            return f"needs compute capability 9.x, this GPU has {torch.cuda.get_device_capability()}"
    if item.get_closest_marker("multicast"):
        from nvcomm.env import multicast_disabled_by

        disabled_by = multicast_disabled_by()
        if disabled_by:
            return f"multicast is switched off by {disabled_by}"
    return None


def _gpus_wanted(item: pytest.Item) -> int:
    marker = item.get_closest_marker("gpus")
    if marker:
        return int(marker.args[0])
    if item.get_closest_marker("multicast"):
        return 2
    return 1 if item.get_closest_marker("gpu") or item.get_closest_marker("sm90") else 0
