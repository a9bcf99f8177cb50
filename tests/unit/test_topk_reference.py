# SPDX-License-Identifier: Apache-2.0
"""The reference of top-k against torch.topk and brute force, and the check that any answer has to pass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.reference import topk as reference
from decode.topk import decode_topk
from tests.topk_data import KINDS, make_rows

BF16_BITS = st.integers(0, 0xFFFF)
SPECIAL_BITS = st.sampled_from([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x3F80, 0xBF80])


def bf16(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def lengths_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sort_rank(value: float) -> float:
    return math.inf if math.isnan(value) else max(min(value, 1e39), -1e39)


@settings(max_examples=200, deadline=None)
@given(st.lists(BF16_BITS | SPECIAL_BITS, min_size=1, max_size=300), st.integers(-5, 320), st.integers(1, 40))
def test_selects_what_sorting_selects(bits, length, k):
    logits = bf16(bits)[None]
    out = reference.topk(logits, lengths_of([length]), k)[0].tolist()
    count = max(0, min(length, len(bits)))
    values = [sort_rank(v) for v in logits[0, :count].float().tolist()]
    wanted = sorted(sorted(range(count), key=lambda i: (-values[i], i))[:k])
    assert out == wanted + [-1] * (k - len(wanted))


@settings(max_examples=100, deadline=None)
@given(st.lists(BF16_BITS | SPECIAL_BITS, min_size=2, max_size=100))
def test_keys_order_as_values(bits):
    values = bf16(bits)
    keys = reference.order_keys(values[None])[0].tolist()
    ranks = [sort_rank(v) for v in values.float().tolist()]
    for i in range(1, len(bits)):
        assert (keys[i] > keys[0], keys[i] == keys[0]) == (ranks[i] > ranks[0], ranks[i] == ranks[0])
        assert 0x80 <= keys[i] <= 0xFFFF


@settings(max_examples=100, deadline=None)
@given(st.lists(BF16_BITS | SPECIAL_BITS, min_size=1, max_size=300), st.integers(-5, 320), st.integers(1, 12))
def test_blocks_select_what_sorting_selects(bits, length, k):
    logits = bf16(bits)[None]
    out = reference.topk_blocks(logits, lengths_of([length]), k)[0].tolist()
    count = max(0, min(length, len(bits)))
    values = [sort_rank(v) for v in logits[0, :count].float().tolist()]
    blocks = [max(values[i : i + 8]) for i in range(0, count, 8)]
    newest = len(blocks) - 1  # -1, and so padding, where there is none
    best = sorted(range(max(newest, 0)), key=lambda i: (-blocks[i], i))[: k - 1]
    wanted = [newest, *sorted(i for i in best if blocks[i] > -1e39)]
    assert out == wanted + [-1] * (k - len(wanted))


def test_blocks_of_negative_infinity_are_padding_unless_newest():
    logits = torch.full((3, 48), -math.inf).bfloat16()
    logits[0, 17], logits[1, 9] = -3e38, math.nan
    out = reference.topk_blocks(logits, lengths_of([48, 43, 8]), 4)
    assert out.tolist() == [[5, 2, -1, -1], [5, 1, -1, -1], [0, -1, -1, -1]]


@pytest.mark.parametrize("kind", list(KINDS))
def test_values_are_those_of_torch_topk(kind, seed):
    logits = make_rows(kind, 2, 1500, seed, "cpu")
    out = decode_topk(logits, lengths_of([1500, 1500]), 512)
    ours = reference.order_keys(logits).gather(1, out.long()).sort(dim=1, descending=True).values
    theirs = reference.order_keys(torch.topk(logits.float(), 512, dim=1).values.to(torch.bfloat16))
    assert torch.equal(ours, theirs.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_check_accepts_the_reference_in_any_order(kind, seed):
    logits, lengths = make_rows(kind, 3, 1500, seed, "cpu"), lengths_of([1500, 700, 3])
    keys = reference.valid_keys(logits, lengths)
    out = decode_topk(logits, lengths, 512)[:, torch.randperm(512, generator=torch.Generator().manual_seed(seed))]
    assert reference.explain_mismatch(keys, 512, out) is None


def test_the_check_rejects_what_is_wrong(seed):
    logits, lengths = make_rows("random", 1, 1500, seed, "cpu"), lengths_of([1400])
    keys = reference.valid_keys(logits, lengths)
    good = decode_topk(logits, lengths, 512)

    def verdict(place, index):
        out = good.clone()
        out[0, place] = index
        return reference.explain_mismatch(keys, 512, out)

    unselected = next(i for i in range(1400) if i not in set(good[0].tolist()) and keys[0, i] < keys[0, good[0]].min())
    assert "largest selected key" in verdict(0, unselected)
    assert "largest selected key" in verdict(0, 1450)
    assert "largest selected key" in verdict(0, -1)
    assert "outside" in verdict(0, 1500)
    assert "outside" in verdict(0, -7)
    ties = make_rows("constant", 1, 1500, seed, "cpu")
    out = decode_topk(ties, lengths, 512)
    out[0, 1] = out[0, 0]
    assert "twice" in reference.explain_mismatch(reference.valid_keys(ties, lengths), 512, out)
    assert "not int32" in reference.explain_mismatch(keys, 512, good.long())
