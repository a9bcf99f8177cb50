# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables: defaults, values, mistakes, and that docs/env.md says the same."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

import nvcomm
import nvcomm.__main__
from nvcomm import env, log
from nvcomm.errors import UsageError
from nvcomm.group import StoreGroup

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(variable.name for variable in env.VARIABLES), *env.OTHERS):
        monkeypatch.delenv(name, raising=False)
    env._warn_once.cache_clear()


def test_defaults() -> None:
    assert env.settings() == env.Settings(
        debug=None,
        debug_file=None,
        timeout_s=30.0,
        device_checks=0,
        cache_dir=Path("~/.cache/nvcomm").expanduser(),
        disable_multicast=False,
        dump=frozenset(),
    )


def test_at_most_twelve_variables_and_each_is_a_field_of_settings() -> None:
    assert len(env.VARIABLES) <= 12
    fields = [variable.name.removeprefix(env.PREFIX).lower() for variable in env.VARIABLES]
    assert fields == list(env.Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("NVCOMM_DEBUG", "info", "debug", "INFO"),
        ("NVCOMM_DEBUG_FILE", "/var/log/%h-%p-%r", "debug_file", "/var/log/%h-%p-%r"),
        ("NVCOMM_TIMEOUT_S", " 0.25 ", "timeout_s", 0.25),
        ("NVCOMM_DEVICE_CHECKS", "1", "device_checks", 1),
        ("NVCOMM_CACHE_DIR", "/var/kernels", "cache_dir", Path("/var/kernels")),
        ("NVCOMM_DISABLE_MULTICAST", "1", "disable_multicast", True),
        ("NVCOMM_DUMP", "sass, ptx", "dump", frozenset({"ptx", "sass"})),
    ],
)
def test_values_are_read_at_call_time(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: object
) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(env.settings(), field) == value
    monkeypatch.setenv(name, "")
    assert getattr(env.settings(), field) != value, "an empty variable means unset"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NVCOMM_DEBUG", "DEBUG"),
        ("NVCOMM_TIMEOUT_S", "0"),
        ("NVCOMM_TIMEOUT_S", "-1"),
        ("NVCOMM_TIMEOUT_S", "nan"),
        ("NVCOMM_TIMEOUT_S", "inf"),
        ("NVCOMM_TIMEOUT_S", "1e9"),
        ("NVCOMM_TIMEOUT_S", "30s"),
        ("NVCOMM_DEVICE_CHECKS", "3"),
        ("NVCOMM_DEVICE_CHECKS", "-1"),
        ("NVCOMM_DISABLE_MULTICAST", "yes"),
        ("NVCOMM_DUMP", "ptx,cubin"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_was_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as raised:
        env.settings()
    wanted = next(variable.wanted for variable in env.VARIABLES if variable.name == name)
    assert name in str(raised.value)
    assert repr(text) in str(raised.value)
    assert wanted in str(raised.value)


def test_cache_dir_follows_xdg_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert env.settings().cache_dir == Path("/var/xdg/nvcomm")
    monkeypatch.setenv("NVCOMM_CACHE_DIR", "/var/kernels")
    assert env.settings().cache_dir == Path("/var/kernels")


def test_an_unknown_variable_warns_once_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCOMM_TIMEOUT", "5")
    with pytest.warns(UserWarning, match=r"NVCOMM_TIMEOUT: did you mean NVCOMM_TIMEOUT_S\?"):
        env.settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.settings()


def test_an_unknown_variable_far_from_all_names_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCOMM_ZZZZZZZZZZZZZZZZZZZZZZ", "5")
    with pytest.warns(UserWarning, match=r"docs/env\.md"):
        env.settings()


@pytest.mark.parametrize(
    ("name", "text", "disabled"),
    [
        ("NVCOMM_DISABLE_MULTICAST", "1", True),
        ("NVCOMM_DISABLE_MULTICAST", "0", False),
        ("NCCL_NVLS_ENABLE", "0", True),
        ("NCCL_NVLS_ENABLE", "1", False),
        ("NCCL_NVLS_ENABLE", "2", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", False),
        ("NVSHMEM_DISABLE_NVLS", "true", True),
        ("NVSHMEM_DISABLE_NVLS", "0", False),
        ("NVSHMEM_DISABLE_NVLS", "", False),
    ],
)
def test_multicast_is_switched_off_by_ours_and_by_the_others(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, disabled: bool
) -> None:
    assert env.multicast_disabled_by() is None
    monkeypatch.setenv(name, text)
    assert env.multicast_disabled_by() == (f"{name}={text}" if disabled else None)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "NVCOMM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(UsageError, match="no home: set it to a folder of yours, or set HOME"):
        env.settings()
    monkeypatch.setenv("NVCOMM_CACHE_DIR", "/a/folder")
    assert str(env.settings().cache_dir) == "/a/folder"


def test_a_variable_of_another_tool_must_be_in_the_table() -> None:
    with pytest.raises(KeyError, match=r"nvcomm\.env\.OTHERS"):
        env.other("HOME")


def test_docs_list_exactly_the_variables_of_the_table() -> None:
    """docs/env.md has one row per variable: name, default, values, meaning."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", (ROOT / "docs/env.md").read_text(), re.MULTILINE)
    documented = {name: (default, wanted, meaning) for name, default, wanted, meaning in rows}
    assert documented == {
        variable.name: (f"`{variable.default}`" if variable.default else "unset", variable.wanted, variable.meaning)
        for variable in env.VARIABLES
    }


def test_docs_list_the_variables_of_other_tools() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) \|$", (ROOT / "docs/env.md").read_text(), re.MULTILINE)
    assert dict(rows) == env.OTHERS


def test_only_env_py_reads_variables() -> None:
    """The library's own variables and the launchers' have one reader; setting or restoring one is not reading it."""
    reads = re.compile(r"""os\.getenv|environ\.get\(["']|environ\[["'][^\]]+\](?!\s*=[^=])""")
    assert reads.search('os.environ["RANK"]')
    assert not reads.search('os.environ["RANK"] = "0"')
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("nvcomm", "decode", "stress")
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line) and path.name != "env.py"
    ]
    assert found == []


@pytest.fixture
def quiet_logger() -> logging.Logger:
    before, level = list(log.logger.handlers), log.logger.level
    yield log.logger
    for handler in set(log.logger.handlers) - set(before):
        log.logger.removeHandler(handler)
        handler.close()
    log.logger.setLevel(level)


def test_the_logger_is_silent_unless_asked(quiet_logger: logging.Logger) -> None:
    log.configure(rank=0)
    assert [type(handler) for handler in quiet_logger.handlers] == [logging.NullHandler]


def test_a_second_import_adds_no_handler(quiet_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcomm, "log", log)  # put back afterwards, as the next line's
    monkeypatch.delitem(sys.modules, "nvcomm.log")
    again = importlib.import_module("nvcomm.log")
    assert again is not log
    assert [type(handler) for handler in quiet_logger.handlers] == [logging.NullHandler]


def test_the_log_file_carries_rank_and_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet_logger: logging.Logger
) -> None:
    monkeypatch.setenv("NVCOMM_DEBUG", "INFO")
    monkeypatch.setenv("NVCOMM_DEBUG_FILE", str(tmp_path / "log-%r"))
    log.configure(rank=3)
    log.configure(rank=3)
    quiet_logger.info("hello")
    quiet_logger.log(log.TRACE, "too fine")
    assert re.fullmatch(r"\S+ \S+ \[ rank 3\] INFO    hello\n", (tmp_path / "log-3").read_text())


def test_communicators_attach_the_log_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet_logger: logging.Logger
) -> None:
    monkeypatch.setenv("NVCOMM_DEBUG", "INFO")
    monkeypatch.setenv("NVCOMM_DEBUG_FILE", str(tmp_path / "log-%r"))
    with nvcomm.virtual_world(2, "cpu", max_bytes=4096):
        pass
    lines = (tmp_path / "log-none").read_text().splitlines()
    assert [line.partition("INFO    ")[2] for line in lines] == [
        f"rank {rank} of 2 on cpu: calls of up to 4096 bytes" for rank in range(2)
    ]
    group = StoreGroup(dist.HashStore(), 0, 1, "log")
    with nvcomm.Communicator(group, "cpu", max_bytes=4096) as comm:
        comm.reset()
    assert re.search(r"\[ rank 0\] INFO    rank 0 of 1: reset\n", (tmp_path / "log-0").read_text())


def test_a_rank_that_becomes_known_is_shown_from_then_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet_logger: logging.Logger
) -> None:
    monkeypatch.setenv("NVCOMM_DEBUG", "INFO")
    for rank in (None, 5, None):
        log.configure(rank)
        quiet_logger.info("hello")
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"\[ *(\S.*)\]", line)[1] for line in lines] == ["-", "rank 5", "rank 5"]


def test_a_log_file_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet_logger: logging.Logger
) -> None:
    monkeypatch.setenv("NVCOMM_DEBUG", "INFO")
    monkeypatch.setenv("NVCOMM_DEBUG_FILE", str(tmp_path / "no" / "log"))
    with pytest.raises(UsageError, match=r"NVCOMM_DEBUG_FILE: .*no/log cannot be written \(No such file"):
        nvcomm.virtual_world(1, "cpu")


def test_list_shows_what_is_not_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NVCOMM_TIMEOUT_S", "soon")
    monkeypatch.setenv("NVCOMM_TIMEOUTS", "3")
    assert nvcomm.__main__.main(["list"]) == 2
    shown = capsys.readouterr()
    assert re.search(r"NVCOMM_TIMEOUT_S +NOT UNDERSTOOD", shown.out)
    assert "NVCOMM_CACHE_DIR" in shown.out
    assert "NVCOMM_TIMEOUT_S='soon' is not understood; wanted seconds" in shown.err
    assert "NVCOMM_TIMEOUTS is unknown: did you mean NVCOMM_TIMEOUT_S?" in shown.err
