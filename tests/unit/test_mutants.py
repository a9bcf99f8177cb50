# SPDX-License-Identifier: Apache-2.0
"""The mutants, as far as a machine without a GPU can judge them: texts, tests, and kernels run on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutation
from tests.host.mutants import MUTANTS as HOST
from tests.kernel.mutants import MUTANTS as KERNEL
from tests.mutation import ROOT, Edit, Mutant

MUTANTS = (*HOST, *KERNEL)


def test_names_are_unique():
    assert len({(mutant.test.split("/")[1], mutant.name) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.test.split('/')[1]}-{mutant.name}")
def test_every_text_is_there(mutant: Mutant, tmp_path: Path):
    for path in {edit.path for edit in mutant.edits}:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    for edit in mutant.edits:
        edit.apply(tmp_path)
    for path in {edit.path for edit in mutant.edits}:
        compile((tmp_path / path).read_text(), path, "exec")


def test_every_named_test_exists():
    named = {test for mutant in MUTANTS for test in (mutant.test, mutant.on_cpu) if test}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    collected = set(done.stdout.splitlines())
    assert named <= collected, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in KERNEL if mutant.on_cpu], ids=lambda mutant: mutant.name)
def test_a_mutant_of_a_kernel_is_caught_on_the_cpu(mutant: Mutant):
    pytest.importorskip("cutlass")
    result = mutation.run(mutant.on_cpu, mutant.edits)
    assert result.caught, result


@pytest.mark.slow
def test_a_change_of_a_comment_is_not():
    """The negative control."""
    pytest.importorskip("cutlass")
    edit = Edit("nvcomm/collectives/turn.py", "  # R1 (i)\n", "  # R1 (1)\n")
    assert mutation.run(KERNEL[0].on_cpu, (edit,)).passed


def test_no_mutant_is_left_to_the_gpu():
    assert [mutant.name for mutant in KERNEL if not mutant.on_cpu] == []
