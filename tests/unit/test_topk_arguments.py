# SPDX-License-Identifier: Apache-2.0
"""The public top-k functions on CPU tensors: edges of what they take, and every refusal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode.topk import compiled, decode_topk, decode_topk_blocks
from decode.topk_arguments import checked_k
from decode.topk_config import MAX_COLUMNS, TopkConfig
from nvcomm.errors import UnsupportedError, UsageError
from tests.topk_data import make_rows


def lengths_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
    assert out[2].tolist() == [74, *range(74)] + [-1] * (2048 - 75)  # the newest block first, as a GPU writes them


@pytest.mark.parametrize("shape", [(0, 600), (0, 0), (3, 0), (1, 0), (1, 1), (1, 7)])
@pytest.mark.parametrize("length", [-1, 0, 5])
def test_buffers_without_a_vector_of_columns(shape, length):
    """No rows, no columns, or fewer columns than a block: an answer, not a refusal."""
    logits = torch.zeros(shape, dtype=torch.bfloat16)
    lengths = lengths_of([length] * shape[0])
    wanted = list(range(max(0, min(length, shape[1]))))
    out, blocks = decode_topk(logits, lengths, 512), decode_topk_blocks(logits, lengths)
    assert out.tolist() == [wanted + [-1] * (512 - len(wanted))] * shape[0]
    assert blocks.tolist() == [[0 if wanted else -1] + [-1] * 2047] * shape[0]


def test_the_answer_is_written_to_out():
    arguments = good_arguments()
    wanted = decode_topk(**arguments)
    wide = torch.full((2, 600), -7, dtype=torch.int32)
    out = wide[:, 4:516]
    assert decode_topk(**(arguments | {"out": out})) is out
    assert torch.equal(out, wanted)
    assert (wide[:, :4] == -7).all()
    assert (wide[:, 516:] == -7).all()


def test_a_k_of_numpy_is_a_number_too():
    """Compiled variants are named by their configuration: one name for one k."""
    assert type(checked_k(np.int64(512))) is int
    assert torch.equal(decode_topk(**(good_arguments() | {"k": np.int64(512)})), decode_topk(**good_arguments()))


def test_logits_of_a_layer_that_is_trained():
    """Indices have no gradient: logits may require one."""
    arguments = good_arguments()
    logits = arguments["logits"].clone().requires_grad_()
    assert torch.equal(decode_topk(**(arguments | {"logits": logits})), decode_topk(**arguments))


def good_arguments():
    return {"logits": make_rows("random", 2, 600, 0, "cpu"), "lengths": lengths_of([600, 600]), "k": 512, "out": None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 100}, "k is 100; wanted one of"),
        ({"k": 512.0}, "k is 512.0; wanted one of"),
        ({"k": torch.tensor([512, 1])}, "k is a Tensor; wanted one of"),
        ({"logits": None}, "logits is a NoneType, wanted a torch.Tensor"),
        ({"logits": np.zeros((2, 600))}, "logits is a ndarray, wanted a torch.Tensor"),
        ({"logits": torch.zeros(2, 600, dtype=torch.bfloat16).to_sparse()}, "wanted a dense tensor"),
        ({"logits": torch.zeros(2, 600, dtype=torch.bfloat16, device="meta")}, "logits .*meta"),
        ({"lengths": [600, 600]}, "lengths is a list"),
        ({"out": [1]}, "out is a list"),
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
        ({"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, "both on one device"),
        ({"lengths": lengths_of([600, 600])[:, None]}, "int32 of shape"),
        ({"out": torch.zeros(2, 512, dtype=torch.int64)}, "out is"),
        ({"out": torch.zeros(2, 512, dtype=torch.int32, device="meta")}, "both on one device"),
        ({"out": torch.zeros(512, 2, dtype=torch.int32).t()}, "contiguous columns"),
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
    for lengths, sharing in (([1, 2], 2), ([1], 2), ([1], 0), ([1, 2, 3], 1.0), ([1, 2, 3], None), ([1], 193)):
        with pytest.raises(UsageError, match="rows_per_length|share lengths"):
            decode_topk_blocks(logits, lengths_of(lengths), rows_per_length=sharing)


def test_gpu_without_clusters(monkeypatch):
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    with pytest.raises(UnsupportedError, match="decode_topk needs clusters .* this is sm_80"):
        compiled(TopkConfig(512, 8, batches=3))
