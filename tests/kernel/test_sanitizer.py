# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over small programs: memcheck and synccheck find nothing.

racecheck looks at shared memory alone and says nothing about mailboxes. Errors that API calls return are not reported:
CUDA's own libraries ask for functions that a driver may lack, and handle the answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("sanitized_*.py"))
FOUND = 9


def sanitizer():
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return tool if Path(tool).exists() else pytest.skip("compute-sanitizer is not installed")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_sanitizer_finds_nothing(program, tool):
    done = subprocess.run(
        [sanitizer(), "--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
        + [sys.executable, "-m", f"tests.kernel.{program}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_there_are_programs():
    assert "sanitized_all_gather" in PROGRAMS
