# SPDX-License-Identifier: Apache-2.0
"""The pages on the decode kernels do what they say: their code runs, their commands parse, what they name exists."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import nvcomm
from benchmarks import sparse_mla, topk, topk_stamps
from decode.kv_cache import PLAIN_FP8
from tests.topk_data import make_rows

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


def code_of(page: str) -> list[str]:
    """A page's blocks of Python that need no GPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    return [block for block in blocks if "cuda" not in block]


def test_the_code_on_the_top_k_page_runs():
    selecting, sharding = code_of("topk")
    names = {"logits": make_rows("random", 3, 9000, 0, "cpu"), "lengths": torch.tensor([9000, 700, 3]).int(), "rows": 3}
    exec(selecting, names)
    assert names["indices"].shape == (3, 512)
    assert names["blocks"].shape == (3, 2048)
    with nvcomm.virtual_world(2, "cpu") as world:
        world.run(lambda comm: run_sharding(sharding, names, comm))


def run_sharding(code: str, names: dict[str, object], comm: nvcomm.Communicator) -> None:
    own = {**names, "comm": comm}
    exec(code, own)
    assert own["mine"] == (range(2), range(2, 3))[comm.rank]
    assert torch.equal(own["indices"], names["indices"])


def test_the_code_on_the_sparse_mla_page_runs():
    (code,) = code_of("sparse_mla")
    names = {
        "window_cache": torch.zeros(8, 32, PLAIN_FP8.record_bytes, dtype=torch.uint8),
        "topk_cache": torch.zeros(8, 128, PLAIN_FP8.record_bytes, dtype=torch.uint8),
        "indices": torch.zeros(2, 640, dtype=torch.int32),
        "lengths": torch.tensor([640, 100], dtype=torch.int32),
        "q": torch.ones(2, 16, 512, dtype=torch.bfloat16),
        "sink": torch.zeros(16),
    }
    exec(code, names)
    assert names["out"].shape == (2, 16, 512)
    assert torch.allclose(names["lse"][1], torch.tensor(100.0).log())
