# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the decode kernels without a GPU: what they compare, what they refuse, which losses they name."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import pytest
import torch

from benchmarks import sparse_mla_calls, topk, topk_cells
from decode.kv_cache import PLAIN_FP8
from decode.sparse_mla import DEFAULT_SM_SCALE, ColumnSet
from decode.sparse_mla import sparse_mla as attention
from decode.topk import decode_topk
from decode.topk_config import MAX_COLUMNS, TopkConfig, choose_config
from tests.sparse_mla_cases import make_case


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
