# SPDX-License-Identifier: Apache-2.0
"""What `nvcomm bench` shows in the end: its table and its plot, and files that cannot take them."""

from __future__ import annotations

import importlib.util

import pytest

from nvcomm.bench import report
from nvcomm.bench.case import Case
from nvcomm.bench.cli import main
from nvcomm.bench.plan import parse
from nvcomm.bench.result import Result


def plan(*arguments):
    return parse(["all_gather", "--world", "host", *arguments])


def test_plot_needs_matplotlib(capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert main(["all_gather", "--world", "host", "--plot", "x.png"]) == 77
    assert "pip install 'nvcomm[bench]'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(capsys, tmp_path):
    assert main(["all_gather", "--world", "host", "--csv", str(tmp_path / "no" / "out.csv")]) == 2
    assert "its folder is not there" in capsys.readouterr().err
    assert main(["all_gather", "--world", "host", "--json", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.foo", "x", "-"])
def test_a_plot_in_no_format_is_told_before_anything_is_measured(capsys, name):
    pytest.importorskip("matplotlib")
    assert main(["all_gather", "--world", "host", "--plot", name]) == 2
    said = capsys.readouterr()
    assert f"--plot {name}: its ending is no format; wanted one of " in said.err
    assert "png" in said.err
    assert said.out == ""


def results():
    return [
        Result(Case.of_size("all_gather", "float", 4, size), impl, [size / 100, size / 90, size / 50], 0)
        for size in (64, 1024, 16384)
        for impl in ("nvcomm", "torch/gloo")
    ]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from nvcomm.bench.plot import _short, draw

    assert [_short(value) for value in (0.5, 3, 64, 4096, 2 << 20)] == ["0.5", "3", "64", "4K", "2M"]
    draw([*results(), Result(Case("all_gather", "float", 4, 1 << 20), "nvcomm", [], 5)], "a test", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_report_tells_what_is_slow_and_what_is_wrong(capsys):
    made = report.Report(plan("--floor", "5", "--no-check"), ["all_gather"], 4, "a test")
    for result in results():
        made.add(result)
    assert [result.case.size_bytes for result in made.slower_than_floor()] == [1024, 16384]
    assert made.finish() == 1
    shown = capsys.readouterr().out
    assert "THE DATA IS NOT CHECKED" in shown
    assert "# SLOWER THAN 5 us: 16384 bytes took 182.04 us" in shown
    assert shown.count("# Avg bus bandwidth") == 2
    made = report.Report(plan(), ["all_gather"], 4, "a test")
    made.add(Result(Case("all_gather", "float", 4, 1), "nvcomm", [], 2))
    assert made.finish() == 1
    assert "# WRONG DATA: nvcomm, 16 bytes: 2 elements" in capsys.readouterr().out
