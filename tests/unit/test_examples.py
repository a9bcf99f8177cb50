# SPDX-License-Identifier: Apache-2.0
"""Examples are short, say how they are started, and run; those for a launcher in tests/host/test_launchers.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.host.test_launchers import LAUNCHER_VARIABLES

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LAUNCHED = [example for example in EXAMPLES if "torchrun" in example.read_text()]
MAX_LINES = 60


def run(example):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, str(example)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_they_are_numbered_and_short():
    assert [int(example.name[:2]) for example in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    too_long = [example.name for example in EXAMPLES if len(example.read_text().splitlines()) >= MAX_LINES]
    assert too_long == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_each_says_how_to_start_it(example):
    assert re.search(rf"^(torchrun|python) .*examples/{example.name}", example.read_text(), re.MULTILINE)


@pytest.mark.parametrize("example", LAUNCHED, ids=lambda example: example.name)
def test_every_launched_example_is_run_by_both_launchers(example):
    """The two files agree: an example for a launcher that no test starts would rot."""
    assert re.search(rf"^mpiexec .*examples/{example.name}", example.read_text(), re.MULTILINE)
    assert f'"{example.name}"' in (ROOT / "tests/host/test_launchers.py").read_text()


def test_without_its_launcher_an_example_says_what_to_do():
    done = run(LAUNCHED[0])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("nvcomm.errors.UsageError")
    assert "Start the program with torchrun or mpiexec" in done.stderr


def test_a_captured_example_runs_or_skips_plainly():
    done = run(ROOT / "examples/02_captured.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("100 replays of 4 ranks" if torch.cuda.is_available() else "skipped: a CUDA graph")


def test_the_vllm_example_skips_plainly():
    """Where vLLM is, tests/integrations/test_vllm.py runs it."""
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    done = run(ROOT / "examples/04_vllm.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "skipped: vLLM is not installed\n"


TUTORIAL = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)


def run_code(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("code", [code for code in TUTORIAL if '"cuda"' not in code])
def test_tutorial(code):
    done = run_code(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("code", [code for code in TUTORIAL if '"cuda"' in code])
def test_tutorial_on_a_gpu(code):
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def test_the_tutorial_is_complete():
    assert [('"cuda"' in code) for code in TUTORIAL] == [False, False, False, True]
