# SPDX-License-Identifier: Apache-2.0
"""What a user gets: lazy public names, the command line, pinned tools, licences, a storey for each module."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nvcomm
from nvcomm.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("nvcomm", "decode", "stress")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_import_nvcomm_loads_neither_torch_nor_cuda() -> None:
    done = _python(
        "import sys, nvcomm, nvcomm.mailbox; print(sorted({'torch', 'numpy', 'cutlass', 'cuda'} & {*sys.modules}))"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_of_the_public_names_loads_no_cuda() -> None:
    done = _python("import sys, nvcomm; nvcomm.Communicator, nvcomm.virtual_world; print('cutlass' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_every_public_name_exists_and_is_documented() -> None:
    for name in nvcomm.__all__:
        value = getattr(nvcomm, name)
        assert name == "__version__" or value.__doc__, name
    assert {*nvcomm.__all__} <= {*dir(nvcomm)}


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Comunicator'.*Communicator"):
        nvcomm.Comunicator  # noqa: B018


def test_list_prints_every_command_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    from nvcomm import env

    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in (*COMMANDS, *(variable.name for variable in env.VARIABLES)):
        assert name in shown


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["list", "--extra"]])
def test_wrong_use_of_the_command_line_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "usage: nvcomm" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_gets_its_own_arguments(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvcomm", command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    assert package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_every_source_file_says_its_licence_first() -> None:
    wanted = "# SPDX-License-Identifier: Apache-2.0"
    files = [path for folder in (*PACKAGES, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    lacking = [str(path.relative_to(ROOT)) for path in files if not path.read_text().startswith(wanted)]
    assert len(files) > 10
    assert lacking == []


def test_no_source_file_is_longer_than_400_lines() -> None:
    files = [path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): length for path in files if (length := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_every_module_of_nvcomm_has_a_storey() -> None:
    """import-linter says nothing about a module that no layer names."""
    layers = " ".join(PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    named = {*re.findall(r"nvcomm\.(\w+)", layers)}
    found = {path.stem if path.is_file() else path.name for path in (ROOT / "nvcomm").iterdir() if _is_module(path)}
    assert found - named - {"__init__", "_version"} == set(), "name it in a layer of [tool.importlinter]"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package: str) -> None:
    """A folder without __init__.py would be left out by the layers, and silently merged with others of its name."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))


def test_linters_are_pinned_alike_everywhere() -> None:
    constraints = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    hooks = dict(re.findall(r"repo: \S+/(\S+)\n +rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert f"ruff=={constraints['ruff']}" in PYPROJECT["project"]["optional-dependencies"]["dev"]
    assert hooks == {"ruff-pre-commit": constraints["ruff"], "codespell": constraints["codespell"]}


def test_constraints_are_exact_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (nvcomm.UsageError("NVCOMM_TIMEOUT_S='soon' is not understood."), 2, "nvcomm bench: NVCOMM_TIMEOUT_S='soon'"),
        (nvcomm.GroupError("rank 1 did not answer."), 1, "nvcomm bench: rank 1 did not answer."),
        (KeyboardInterrupt(), 130, "nvcomm bench: interrupted"),
    ],
)
def test_a_command_that_ends_early_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    def end(rest: list[str]) -> int:
        raise error

    monkeypatch.setattr("nvcomm.bench.cli.main", end)
    assert main(["bench"]) == code
    assert capsys.readouterr().err.startswith(says)


def test_a_reader_that_goes_away_is_no_error() -> None:
    listing = subprocess.Popen(
        [sys.executable, "-m", "nvcomm", "list"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout is not None
    listing.stdout.close()
    _, said = listing.communicate(timeout=240)
    assert (listing.returncode, said) == (141, b"")
