# SPDX-License-Identifier: Apache-2.0
"""`nvcomm compile` fills the cache without a GPU, and with what a communicator will look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvcomm import compile as compile_command
from nvcomm.options import Options

ROOT = Path(__file__).parents[2]
FEW = ("--world-size", "2", "--transport", "peer", "--max-bytes", "4096", "--op", "all_gather")


def _run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nvcomm", "compile", *arguments],
        cwd=ROOT,
        env={**os.environ, "NVCOMM_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_it_fills_the_cache_and_then_finds_everything_there(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    cache = tmp_path / "kernels"
    first = _run("--arch", "sm_90a", *FEW, cache=cache)
    assert first.returncode == 0, first.stderr
    files = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    kernels = [line for line in first.stdout.splitlines() if line.startswith("sm_90a")]
    assert len(files) == len(kernels) > 0
    again = _run("--arch", "sm_90a", *FEW, cache=cache)
    assert again.returncode == 0, again.stderr
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == files


def test_other_options_are_other_kernels() -> None:
    pytest.importorskip("cutlass")
    keys = [
        repr(variant.key)
        for pdl in ("off", "safe", "early")
        for max_bytes in (4096, 8192)
        for variant in compile_command.variants([2, 3], max_bytes, pdl, ["peer", "multicast"])
    ]
    assert len(keys) == len(set(keys))


def test_reductions_are_other_kernels_too() -> None:
    pytest.importorskip("cutlass")
    keys = [
        (type(variant.kernel), repr(variant.key))
        for dtype in ("bf16", "fp32")
        for op in ("all_reduce", "reduce_scatter")
        for variant in compile_command.reducing_variants(op, dtype, [2, 3], Options(max_bytes=4096))
    ]
    assert len(keys) == len(set(keys)) == 24


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--arch"),
        (("--arch", "sm_42"), "invalid choice: 'sm_42'"),
        (("--arch", "sm_90a", "--world-size", "9"), "wanted 1 to 8, got 9"),
        (("--arch", "sm_90a", "--op", "gather"), "invalid choice: 'gather'"),
        (("--arch", "sm_90a", "--op", "all_reduce_mhc"), "wants --hidden"),
        (("--arch", "sm_90a", "--op", "topk_blocks"), "want --columns"),
        (("--arch", "sm_90a", "--op", "topk", "--columns", "1048577"), "wanted 1 to 1048576, got 1048577"),
        (("--arch", "sm_90a", "--op", "sparse_mla", "--heads", "12"), "takes 8, or a multiple of 16"),
    ],
)
def test_wrong_use_exits_2(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        compile_command.main(arguments)
    assert raised.value.code == compile_command.EXIT_USAGE
    shown = capsys.readouterr().err
    assert "usage: nvcomm compile" in shown
    assert says in shown


def test_a_shape_that_no_kernel_takes_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass")
    asked = ["--arch", "sm_90a", "--op", "all_reduce_mhc", "--hidden", "63"]
    assert compile_command.main(asked) == compile_command.EXIT_USAGE
    assert "nvcomm compile: hidden is 63; wanted: a multiple of 64" in capsys.readouterr().err


def test_a_dry_run_lists_each_kernel_once_and_compiles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setenv("NVCOMM_CACHE_DIR", str(tmp_path / "kernels"))
    ops = [op for op in compile_command.OPS if op != "all_gather"]
    asked = ["--world-size", "4", "--hidden", "5120", "--columns", "4096", "65536", "--dry-run"]
    assert compile_command.main(["--arch", "sm_90a", "sm_103a", "--op", *ops, *asked]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "nothing was compiled"
    assert not (tmp_path / "kernels").exists()
    # 4 LL and two-shot and 2 boundaries for each transport; 2 reduce-scatter; 4 + 4 top-k; 12 sparse MLA.
    assert len(lines) == len(set(lines)) == 2 * (2 * 4 + 2 + 2 * 2 + 4 + 4 + 12)
    assert lines[-1].split()[:2] == ["sm_103a", "68/68"]


def test_a_cache_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    tmp_path.chmod(0o777)
    done = _run("--arch", "sm_90a", *FEW, cache=tmp_path)
    assert done.returncode == compile_command.EXIT_USAGE
    assert str(tmp_path) in done.stderr


@pytest.mark.gpu
def test_a_communicator_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    cache = tmp_path / "kernels"
    done = _run("--arch", f"sm_{major}{minor}a", *FEW, "--op", "all_reduce", cache=cache)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in cache.iterdir())
    build = """
import nvcomm, torch
with nvcomm.virtual_world(2, "cuda", max_bytes=4096) as world:
    world.prepare("all_reduce", torch.bfloat16)
"""
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=ROOT,
        env={**os.environ, "NVCOMM_CACHE_DIR": str(cache)},
        check=True,
        timeout=240,
    )
    assert sorted(path.name for path in cache.iterdir()) == files
