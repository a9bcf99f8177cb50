# SPDX-License-Identifier: Apache-2.0
"""`python -m stress` as a user runs it: every exit code really happens, the JSON holds what it promises."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stress import report

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the host world runs on x86-64 alone")
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "stress"]


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    return inherited | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | extra


def stress(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=environment(**extra), capture_output=True, text=True, timeout=240
    )


def wait_until(condition, what: str, limit_s: float = 120.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {limit_s} s")


def children(pid: int) -> list[int]:
    """The processes that `pid` forked, in that order."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def four_at_work(pid: int) -> list[int]:
    """Waits until the four ranks are in their replays: they have their mailboxes, and have burnt some time since."""
    before: dict[int, int] = {}

    def at_work() -> list[int]:
        ranks = children(pid)
        for rank in ranks:
            if rank not in before and "memfd:nvcomm" in maps(rank):
                before[rank] = ticks(rank)
        busy = [rank for rank in ranks if rank in before and ticks(rank) > before[rank] + 30]
        return ranks if len(ranks) == len(busy) == 4 else []

    return wait_until(at_work, "four ranks at work")


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


@pytest.fixture(scope="module")
def proven() -> dict:
    done = stress("--world", "host", "--replays", "60", "--seed", "7", "--json", "-")
    assert done.returncode == report.EXIT_PROVEN, done.stderr
    return json.loads(done.stdout)


def test_a_proven_run_says_what_it_did(proven):
    assert (proven["schema"], proven["verdict"], proven["exit_code"]) == ("nvcomm.stress/1", "proven", 0)
    assert (proven["replays"], proven["gathers"], proven["bad_words"], proven["first_bad"]) == (60, 180, 0, None)
    assert (proven["seed"], proven["world"], proven["ranks"]) == (7, "host", 4)
    assert (proven["transport"], proven["protocol"], proven["op"]) == ("peer", "mailbox", "all_gather")
    assert proven["audit"] == []
    assert proven["doubts"] == []
    assert proven["hang"] is None
    assert proven["seconds"] > 0
    assert [stats["calls"] for stats in proven["stats"]] == [180] * 4
    assert all(stats["escapes"] > 0 for stats in proven["stats"])
    assert {"cpu", "gpu", "python", "nvcomm", "packages"} <= set(proven["machine"])


def test_its_control_showed_a_stale_word_and_names_it(proven):
    control = proven["control"]
    assert control["protocol"] == "late-copy"
    assert control["failed_as_it_must"] is True
    assert control["bad_words"] > 0
    first = control["first_bad"]
    assert first["kind"] == "stale"
    assert set(first["expected"]) == {"rank", "gather", "replay", "index"}


def test_the_delayed_transport_is_proven_too(tmp_path):
    path = tmp_path / "out.json"
    done = stress("--world", "host", "--replays", "120", "--transport", "delayed", "--ranks", "3", "--json", str(path))
    assert done.returncode == report.EXIT_PROVEN, done.stderr
    result = json.loads(path.read_text())
    assert (result["transport"], result["ranks"], result["bad_words"]) == ("delayed", 3, 0)
    assert done.stdout == ""


@pytest.mark.parametrize("transport", ["peer", "delayed"])
def test_the_known_bad_protocol_exits_1_with_the_first_word_decoded(transport):
    done = stress(
        *("--world", "host", "--replays", "400", "--protocol", "late-copy", "--timeout", "2"),
        *("--transport", transport, "--json", "-"),
    )
    assert done.returncode == report.EXIT_BAD, done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "failed"
    assert result["bad_words"] > 0
    assert result["control"] is None
    first = result["first_bad"]
    # Whoever took a stale word for a fresh one runs ahead, and its peers then see words before they are due.
    assert first["kind"] in {"stale", "early", "reserved"}
    if first["kind"] == "stale":
        when = [(first[side]["replay"], first[side]["gather"]) for side in ("seen", "expected")]
        assert when[0] < when[1]
        assert "first wrong word: rank" in done.stderr


def test_a_control_that_does_not_fail_leaves_the_run_unproven():
    done = stress("--world", "host", "--replays", "20", "--control", "none", "--json", "-")
    assert done.returncode == report.EXIT_UNPROVEN, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["doubts"]) == ("unproven", ["no control ran"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ranks", "9"],
        ["--replays", "0"],
        ["--seed", "-1"],
        ["--world", "host", "--transport", "multicast"],
        ["--world", "nowhere"],
        ["--duration", "nan"],
        ["--world", "host", "--json", "/nowhere/out.json"],
    ],
)
def test_usage_errors_exit_2(arguments):
    done = stress(*arguments)
    assert done.returncode == report.EXIT_USAGE
    assert "error:" in done.stderr


def test_host_ranks_under_torchrun_are_a_usage_error():
    done = stress("--world", "host", "--replays", "3", RANK="0", WORLD_SIZE="4")
    assert done.returncode == report.EXIT_USAGE
    assert "without torchrun" in done.stderr


@pytest.mark.parametrize("name", ["NVCOMM_TIMEOUT_S", "WORLD_SIZE"])
def test_a_variable_that_is_not_understood_exits_2_and_is_named(name):
    done = stress("--world", "peer", "--replays", "3", **{"RANK": "0", "WORLD_SIZE": "2"} | {name: "some"})
    assert done.returncode == report.EXIT_USAGE, done.stderr
    assert f"{name}='some'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_when_the_result_is_written():
    done = stress("--world", "host", "--replays", "3", "--control", "none", "--json", "/dev/full")
    assert done.returncode == report.EXIT_USAGE, done.stderr
    assert "error: --json /dev/full cannot be written (No space left" in done.stderr


def test_a_machine_without_a_gpu_exits_77():
    done = stress("--world", "virtual", "--replays", "8", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == report.EXIT_UNSUPPORTED, done.stderr
    assert "unsupported:" in done.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_ends_in_124_and_is_named(tmp_path, signal_number):
    path = tmp_path / "out.json"
    arguments = ["--world", "host", "--duration", "300", "--timeout", "2", "--control", "none", "--json", str(path)]
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ranks = four_at_work(process.pid)
        os.kill(ranks[2], signal_number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == report.EXIT_HANG, errors
    result = json.loads(path.read_text())
    assert result["verdict"] == "failed"
    assert result["bad_words"] == 0
    hang = result["hang"]
    assert hang["root_ranks"] == [2], hang
    assert sorted(wait["rank"] for wait in hang["waits"]) == [0, 1, 3], hang
    assert all(1.9 < wait["waited_s"] < 30 for wait in hang["waits"]), hang
    assert "waits for rank 2" in errors
    wanted = "was killed by SIGKILL" if signal_number == signal.SIGKILL else "is stopped"
    assert hang["positions"][2]["note"] == f"process {ranks[2]} {wanted}"
    for pid in ranks:
        assert not Path(f"/proc/{pid}").exists(), "a rank is left behind"


def test_an_interrupted_run_ends_with_130_and_no_traceback():
    with subprocess.Popen(
        [*COMMAND, "--world", "host", "--duration", "300", "--control", "none"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored where tests run unattended
    ) as process:
        ranks = four_at_work(process.pid)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "nvcomm stress: interrupted"
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), "a rank is left behind"


def test_no_rank_and_no_file_survives_the_parent(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--world", "host", "--duration", "300", "--control", "none"],
        cwd=ROOT,
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        ranks = four_at_work(process.pid)
        process.kill()
        process.wait()
    wait_until(lambda: not any(ticks(pid) for pid in ranks), "the end of all ranks")
    assert not list(tmp_path.rglob("*"))
