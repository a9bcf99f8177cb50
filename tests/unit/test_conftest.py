# SPDX-License-Identifier: Apache-2.0
"""Which tests are skipped, and that the reason is told: a test that is never run must not look like one that passed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import conftest


class Item:
    """As much of a pytest item as the skips look at."""

    def __init__(self, **markers: tuple[object, ...]) -> None:
        self._markers = {name: pytest.mark.__getattr__(name)(*args).mark for name, args in markers.items()}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._markers.get(name)


@pytest.fixture(params=[0, 1, 4])
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(conftest, "_gpu_state", lambda: (request.param, "" if request.param else "no GPU here"))
    return request.param


@pytest.mark.parametrize(("markers", "wanted"), [({}, 0), ({"gpu": ()}, 1), ({"gpus": (2,)}, 2), ({"gpus": (4,)}, 4)])
def test_a_test_runs_where_there_are_gpus_enough(num_gpus: int, markers: dict[str, tuple], wanted: int) -> None:
    reason = conftest._skip_reason(Item(**markers), compile_all=False)
    assert (reason is None) == (num_gpus >= wanted)
    if reason is not None:
        assert reason == ("no GPU here" if num_gpus == 0 else f"needs {wanted} GPUs, this machine has {num_gpus}")


def test_multicast_tests_name_the_variable_that_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "_gpu_state", lambda: (4, ""))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("NVCOMM_DISABLE_MULTICAST", raising=False)
    assert conftest._skip_reason(Item(multicast=()), compile_all=False) == (
        "multicast is switched off by NCCL_NVLS_ENABLE=0"
    )
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(name)
    assert conftest._skip_reason(Item(multicast=()), compile_all=False) is None


@pytest.mark.parametrize("compile_all", [False, True])
def test_the_full_compile_matrix_runs_only_when_asked_for(*, compile_all: bool) -> None:
    assert (conftest._skip_reason(Item(compile_all=()), compile_all=compile_all) is None) == compile_all


@pytest.mark.parametrize("model_all", [False, True])
def test_long_searches_run_only_when_asked_for(*, model_all: bool) -> None:
    reason = conftest._skip_reason(Item(model_all=()), compile_all=False, model_all=model_all)
    assert (reason is None) == model_all


def test_no_example_has_a_deadline_and_the_seed_is_the_runs(pytestconfig: pytest.Config) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
    assert pytestconfig.getoption("hypothesis_seed") is not None


def test_the_environment_is_set_before_any_context() -> None:
    assert int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) >= 8
    assert {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"} <= {*os.environ}
