# SPDX-License-Identifier: Apache-2.0
"""The reference of top-k, and the public functions on CPU tensors, against torch.topk and brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.reference import topk as reference
from decode.sharded_topk import owned_rows, rows_per_rank, sharded_topk
from decode.topk import decode_topk, decode_topk_blocks
from decode.topk_config import MAX_COLUMNS, MAX_ROWS, MAX_STEPS, SUPPORTED_K, SharedLayout, choose_config
from nvcomm.errors import UsageError
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
    if blocks:
        blocks[-1] = math.nan
    order = sorted(range(len(blocks)), key=lambda i: (-math.inf if math.isnan(blocks[i]) else -blocks[i], i))
    order.sort(key=lambda i: not math.isnan(blocks[i]))
    wanted = sorted(i for i in order[:k] if math.isnan(blocks[i]) or blocks[i] > -1e39)
    assert out == wanted + [-1] * (k - len(wanted))


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


def test_lengths_are_clamped():
    logits = make_rows("rising", 4, 600, 0, "cpu")
    out = decode_topk(logits, lengths_of([-(2**31), 0, 5, 2**31 - 1]), 512)
    assert (out[:2] == -1).all()
    assert out[2].tolist() == [0, 1, 2, 3, 4] + [-1] * 507
    assert (out[3] >= 0).all()


def test_blocks_on_cpu_share_lengths():
    logits = make_rows("random", 4, 600, 0, "cpu")
    out = decode_topk_blocks(logits, lengths_of([-1, 600]), rows_per_length=2)
    assert (out[:2] == -1).all()
    assert out[2].tolist() == list(range(75)) + [-1] * (2048 - 75)


def good_arguments():
    return {"logits": make_rows("random", 2, 600, 0, "cpu"), "lengths": lengths_of([600, 600]), "k": 512, "out": None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 100}, "one of"),
        ({"logits": torch.zeros(2, 600)}, "bfloat16"),
        ({"logits": torch.zeros(600, dtype=torch.bfloat16)}, "bfloat16"),
        ({"logits": torch.zeros(2, 1204, dtype=torch.bfloat16)[:, :1200:2]}, "column stride"),
        ({"logits": torch.zeros(2, 601, dtype=torch.bfloat16)[:, :600]}, "row stride"),
        ({"logits": torch.zeros(1, 600, dtype=torch.bfloat16).expand(2, 600)}, "row stride"),
        ({"logits": torch.zeros(2, 608, dtype=torch.bfloat16)[:, 1:601]}, "multiple of 16"),
        ({"logits": torch.zeros(193, 8, dtype=torch.bfloat16), "lengths": lengths_of([0] * 193)}, "at most 192"),
        ({"logits": torch.zeros(1, MAX_COLUMNS + 8, dtype=torch.bfloat16), "lengths": lengths_of([0])}, "at most"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "int32"),
        ({"lengths": lengths_of([600])}, "int32"),
        ({"lengths": lengths_of([600, 0, 600, 0])[::2]}, "contiguous"),
        ({"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, "on one device"),
        ({"out": torch.zeros(2, 512, dtype=torch.int64)}, "out is"),
        ({"out": torch.zeros(2, 511, dtype=torch.int32)}, "out is"),
        ({"out": torch.zeros(1, 512, dtype=torch.int32).expand(2, 512)}, "overlap"),
    ],
)
def test_bad_arguments_are_usage_errors(change, says):
    decode_topk(**good_arguments())
    with pytest.raises(UsageError, match=says):
        decode_topk(**(good_arguments() | change))


def test_blocks_check_the_sharing_of_lengths():
    logits = make_rows("random", 3, 600, 0, "cpu")
    for lengths, sharing in (([1, 2], 2), ([1], 2), ([1], 0)):
        with pytest.raises(UsageError):
            decode_topk_blocks(logits, lengths_of(lengths), rows_per_length=sharing)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, MAX_ROWS),
    st.integers(1, MAX_COLUMNS),
    st.sampled_from(SUPPORTED_K),
    st.sampled_from(["columns", "blocks"]),
    st.sampled_from([78, 114, 132, 148]),
)
def test_every_size_has_a_configuration_that_fits(rows, columns, k, mode, num_sms):
    config = choose_config(rows, columns, k, mode=mode, num_sms=num_sms)
    assert config.quota * config.cluster >= k
    assert config.groups_per_thread * config.threads >= config.quota
    assert config.batches * 8 * config.step_vectors * 8 >= columns
    # Names of batches and vectors have 16 bits, marks of a thread's batches 32.
    assert config.threads * config.batches * 8 <= MAX_STEPS
    assert config.batches <= 32
    # Packed counts have 16 bits for the candidates of all CTAs and for k equal elements of each; headers 13 and 12.
    assert config.cluster * (config.candidate_capacity + k) < 1 << 16
    assert config.candidate_capacity < 1 << 13
    assert config.candidate_capacity % 8 == 0
    assert SharedLayout(config).total_bytes <= 227 * 1024
    assert SharedLayout(config).maxima % 16 == 0
    assert SharedLayout(config).received % 16 == 0


def test_all_rows_are_resident_at_once():
    clusters = [choose_config(rows, 65_536, 512).cluster for rows in range(1, 193)]
    assert all(rows * cluster <= 132 for rows, cluster in enumerate(clusters[:132], 1))
    assert [clusters[rows - 1] for rows in (1, 15, 16, 30, 31, 66, 67, 192)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert choose_config(192, MAX_COLUMNS, 512).cluster == 2


def test_large_buffers_keep_their_place_between_calls():
    always = {(1, 1 << 20), (12, 1 << 20), (24, 1 << 19), (64, 1 << 19), (64, 1 << 20)}
    short = {(24, 1 << 20), (48, 1 << 19), (48, 1 << 20)}
    assert {choose_config(rows, columns, 512).pdl for rows, columns in always} == {"always"}
    assert {choose_config(rows, columns, 512).pdl for rows, columns in short} == {"short"}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 192), st.integers(1, 8))
def test_every_row_is_owned_once_and_in_order(rows, world_size):
    owned = [row for rank in range(world_size) for row in owned_rows(rows, rank, world_size)]
    assert owned == list(range(rows))
    assert max(len(owned_rows(rows, rank, world_size)) for rank in range(world_size)) == rows_per_rank(rows, world_size)


@dataclass
class LockstepWorld:
    """Ranks that are called one after the other, twice: first to learn what each sends, then to deliver it."""

    world_size: int
    rank: int = 0
    sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def all_gather(self, x, out=None):
        self.sent[self.rank] = x.clone()
        if len(self.sent) == self.world_size:
            out.copy_(torch.stack([self.sent[r] for r in range(self.world_size)]))
        return out


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sharded_equals_unsharded(rows, world_size, seed):
    logits = make_rows("random", max(rows, 1), 904, seed, "cpu")[:rows]
    lengths = lengths_of([904, 30, 513, -1, 0, 899, 700, 512][:rows])
    world = LockstepWorld(world_size)
    for turn in range(2):
        for rank in range(world_size):
            world.rank = rank
            mine = owned_rows(rows, rank, world_size)
            only_mine = torch.full_like(logits, float("nan"))
            only_mine[mine.start : mine.stop] = logits[mine.start : mine.stop]
            out = sharded_topk(world, only_mine, lengths, 512)
            if turn == 1:
                assert torch.equal(out, decode_topk(logits, lengths, 512))


def test_sharded_checks_its_buffers():
    world = LockstepWorld(2)
    arguments = good_arguments()
    del arguments["out"]
    with pytest.raises(UsageError, match="gathered"):
        sharded_topk(world, **arguments, gathered=torch.zeros(2, 2, 512, dtype=torch.int32))
    with pytest.raises(UsageError, match="local"):
        sharded_topk(world, **arguments, local=torch.zeros(1, 512))
