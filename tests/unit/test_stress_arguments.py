# SPDX-License-Identifier: Apache-2.0
"""The command line of the stress run, and what a run is bounded by."""

from __future__ import annotations

import pytest

from stress import oracle
from stress.cli import parse
from stress.worker import engine_options
from tests.unit.stress_outcomes import CONFIG


def test_a_run_ends_before_words_repeat():
    assert CONFIG.replay_limit == 10
    assert CONFIG.but(replays=None, duration_s=1e6).replay_limit == 1 << 27


def test_defaults_of_the_command_line():
    options = parse([])
    assert (options.world, options.transport, options.protocol) == ("auto", "auto", "mailbox")
    assert options.control
    assert options.replays is None
    assert options.duration_s == 45.0
    assert parse(["--replays", "5"]).duration_s is None
    assert not parse(["--protocol", "late-copy"]).control
    assert not parse(["--control", "none"]).control
    assert parse(["--seed", "0x10"]).seed == 16


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transport", "multicast", "--world", "virtual"],
        ["--timeout", "0"],
        ["--op", "x"],
        ["--control", "mailbox"],  # a protocol that holds would show nothing
        ["--replays", str(oracle.MAX_REPLAYS + 1)],  # words would repeat
    ],
)
def test_bad_arguments_end_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2


def test_ranks_between_processes_check_each_other_where_the_variable_says_so(monkeypatch):
    monkeypatch.delenv("NVCOMM_DEVICE_CHECKS", raising=False)
    assert engine_options(CONFIG)["device_checks"] == 0
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    assert engine_options(CONFIG)["device_checks"] == 1
