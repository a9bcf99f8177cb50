# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the decode kernels as far as a machine without a GPU can tell: the commands that the result pages
give are ones, the checks of a cell see what is wrong, and a loss is named."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import sparse_mla, sparse_mla_calls, topk, topk_cells, topk_stamps
from decode.kv_cache import PLAIN_FP8
from decode.sparse_mla import DEFAULT_SM_SCALE, ColumnSet
from decode.sparse_mla import sparse_mla as attention
from decode.topk import decode_topk
from decode.topk_config import MAX_COLUMNS, TopkConfig, choose_config
from tests.sparse_mla_cases import make_case

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"topk": topk.parser, "topk_stamps": topk_stamps.parser, "sparse_mla": sparse_mla.parser}


def commands(page: str) -> list[str]:
    """What a page tells to type, and options that it names beside a command, for the page's benchmark."""
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text()
    found = re.findall(r"(?:^|`)(python\s-m\sbenchmarks\.\w+[^`\n]*)", text, re.MULTILINE)
    return found + [f"python -m benchmarks.{page} {options}" for options in re.findall(r"`(--[^`]+)`", text)]


def parse(command: str) -> Namespace:
    _, _, module, *options = shlex.split(command)
    return PARSERS[module.removeprefix("benchmarks.")]().parse_args(options)


@pytest.mark.parametrize(("page", "at_least"), [("topk", 4), ("sparse_mla", 2)])
def test_commands_of_the_result_pages_parse(page, at_least):
    found = commands(page)
    assert len(found) >= at_least
    for command in found:
        parse(command)


def test_an_option_that_is_none_does_not_parse(capsys):
    with pytest.raises(SystemExit):
        parse("python -m benchmarks.topk --row 1,2 --nothing")
    assert "--nothing" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["topk", "sparse_mla"])
def test_files_and_tests_that_the_pages_name_exist(page):
    named = set()
    for text in ((ROOT / "docs" / f"{page}.md").read_text(), (ROOT / "docs" / "results" / f"{page}.md").read_text()):
        named |= set(re.findall(r"((?:tests|benchmarks|decode)/[\w/]+\.(?:py|cu))", text))
        named |= {f"decode/{name}" for name in re.findall(r"`((?:topk|sparse_mla|kv_cache)\w*\.py)`", text)}
    assert len(named) >= 3
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def options(*words: str) -> Namespace:
    made: ArgumentParser = topk.parser()
    return made.parse_args(words)


def test_variants_are_what_the_public_function_takes_or_what_was_asked_for():
    assert topk.variants(24, MAX_COLUMNS, options(), 132) == [choose_config(24, MAX_COLUMNS, 512, num_sms=132)]
    assert topk.variants(24, MAX_COLUMNS, options("--no-pdl"), 78)[0].pdl == "off"
    asked = topk.variants(24, 65_536, options("--clusters", "4,8", "--threads", "512,1024"), 132)
    assert [(one.cluster, one.threads) for one in asked] == [(4, 512), (4, 1024), (8, 512), (8, 1024)]
    # One CTA cannot hold the maxima of so wide a row.
    assert topk.variants(24, MAX_COLUMNS, options("--clusters", "1"), 132) == []


class FakeCell:
    """Times that are given."""

    valid = 65_536
    out = torch.zeros(1)

    def __init__(self, hot: list[float]) -> None:
        self.buffers, self.hot = [torch.zeros(1, 65_536)], iter(hot)

    def time(self, config: TopkConfig, replays: int, *, cold: bool) -> float:
        return next(self.hot)

    def torch_us(self, replays: int, mode: str) -> float:
        return 40.0


@pytest.mark.parametrize(
    ("hot", "lost"), [([5.0], ""), ([5.3], "bar"), ([5.0, 5.3], "bar"), ([41.0, 5.0], "bar torch"), ([], "")]
)
def test_a_line_names_what_any_variant_lost_to(monkeypatch, hot, lost):
    monkeypatch.setattr(topk, "floor_us", lambda *args: (2.19, 1))
    monkeypatch.setattr(topk, "num_sms", lambda device: 132)
    monkeypatch.setattr(topk, "variants", lambda *args: [TopkConfig(512, 8)] * len(hot))
    line = topk.measure(FakeCell(hot), options("--no-cold"), None)
    assert line.split("|")[-1].strip() == lost
    assert "5.19" in line


def test_a_wrong_selection_ends_the_run():
    cell = object.__new__(topk_cells.Cell)
    cell.k, cell.valid, cell.lengths = 512, 900, torch.tensor([900], dtype=torch.int32)
    buffer = torch.arange(1000).bfloat16()[None]
    cell.out = decode_topk(buffer, cell.lengths, 512)
    cell.check(TopkConfig(512, 8), buffer)
    cell.out[0, 0] = 950
    with pytest.raises(SystemExit, match="outside"):
        cell.check(TopkConfig(512, 8), buffer)
    cell.out.fill_(-7)
    with pytest.raises(SystemExit, match="outside"):
        cell.check(TopkConfig(512, 8), buffer)


def test_the_error_is_of_what_the_last_call_left():
    case = make_case(PLAIN_FP8, tokens=2, widths=(128, 0), sink=True, device="cpu", num_slots=256)
    out, lse = attention(case.q, case.window, sink=case.sink, sm_scale=DEFAULT_SM_SCALE)
    window = ColumnSet(case.window.records, case.window.indices)
    call = sparse_mla_calls.Call(case.q, window, None, case.sink, out, lse, window.indices)
    assert sparse_mla_calls.error_of(call) == 1.0
    # Nobody has written to the output since.
    assert sparse_mla_calls.error_of(call) != sparse_mla_calls.error_of(call)
