# SPDX-License-Identifier: Apache-2.0
"""The front page does what it says: its code runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
GPU_BLOCKS = [block for block in BLOCKS if '"cuda"' in block]
CPU_BLOCKS = [block for block in BLOCKS if '"cuda"' not in block]


def _run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_code_for_both_machines() -> None:
    assert CPU_BLOCKS
    assert GPU_BLOCKS


@pytest.mark.parametrize("code", CPU_BLOCKS)
def test_cpu_code_runs(code: str) -> None:
    _run(code)


@pytest.mark.gpu
@pytest.mark.parametrize("code", GPU_BLOCKS)
def test_gpu_code_runs(code: str) -> None:
    _run(code)


def test_every_link_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) > 5
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_every_make_target_of_the_front_page_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named >= {"stress", "test"}
    assert named <= targets
