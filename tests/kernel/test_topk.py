# SPDX-License-Identifier: Apache-2.0
"""decode.topk on a GPU against torch.topk: kinds of rows, cluster sizes, lengths; graphs whose lengths change."""

from __future__ import annotations

import pytest
import torch

import nvcomm
from decode import topk
from decode.reference import topk as reference
from decode.sharded_topk import rows_per_rank, sharded_topk
from decode.topk_config import MAX_ROWS, TopkConfig
from tests.topk_data import KINDS, make_rows

pytestmark = pytest.mark.gpu
K_OF = {1: 2048, 2: 512, 4: 1024, 8: 512, 16: 2048}


def variant(k: int, cluster: int, **options: object) -> TopkConfig:
    """A configuration that takes rows of up to 524,288 columns."""
    return TopkConfig(k, cluster, batches=max(1, 8 // cluster), **options)


def run(config: TopkConfig, logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out = torch.full((logits.shape[0], config.k), -7, dtype=torch.int32, device="cuda")
    topk.launch(config, logits, lengths, out)
    return out


def check(config: TopkConfig, logits: torch.Tensor, lengths: torch.Tensor) -> None:
    out = run(config, logits, lengths)
    if config.mode == "blocks":
        wanted = reference.topk_blocks(logits, lengths, config.k)
        keys = reference.block_keys(logits, lengths)
        keys[keys == reference.NEG_INF_KEY] = 0
        newest = (lengths.clamp(0, logits.shape[1]) - 1) // 8
        keys[newest[:, None] == torch.arange(keys.shape[1], device="cuda")] = 1 << 17
        assert torch.equal(out[:, 0], newest)
        assert torch.equal((out >= 0).sum(1), (wanted >= 0).sum(1))
    else:
        keys = reference.valid_keys(logits, lengths)
    assert reference.explain_mismatch(keys, config.k, out) is None
    if config.deterministic:
        assert torch.equal(out, reference.select(keys, config.k))


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_kinds_of_rows(kind: str, cluster: int, seed: int) -> None:
    config = variant(K_OF[cluster], cluster)
    for columns in (2051, 70_001, 262_144):
        logits = make_rows(kind, 3, columns, seed, "cuda")
        check(config, logits, int32([columns, columns // 8 + 1, config.k + 1]))


@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_against_torch_topk_values(k: int, seed: int) -> None:
    logits = make_rows("random", 5, 131_072, seed, "cuda")
    out = topk.decode_topk(logits, int32([131_072] * 5), k)
    values = logits.gather(1, out.long()).sort(dim=1, descending=True).values
    assert torch.equal(values, torch.topk(logits, k, dim=1).values)


@pytest.mark.parametrize(
    "kind", ["random", "narrow", "constant", "rising", "every_pattern", "periodic", "signed_zeros"]
)
@pytest.mark.parametrize("cluster", [1, 8])
def test_deterministic(kind: str, cluster: int, seed: int) -> None:
    logits = make_rows(kind, 3, 100_003, seed, "cuda")
    check(variant(512, cluster, deterministic=True), logits, int32([100_003, 40_000, 513]))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("cluster", [1, 8])
def test_blocks(kind: str, cluster: int, seed: int) -> None:
    logits = make_rows(kind, 6, 131_075, seed, "cuda")
    check(variant(2048, cluster, mode="blocks"), logits, int32([131_075, 131_072, 30_001, 16_384, 9, 1]))


def test_blocks_of_empty_rows_and_shared_lengths(seed: int) -> None:
    logits = make_rows("random", 6, 20_000, seed, "cuda")
    out = topk.decode_topk_blocks(logits, int32([-3, 20_000]), rows_per_length=3)
    assert (out[:3] == -1).all()
    assert (out[3:, 0] == 2499).all()
    assert (out[3:] >= 0).all()


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_short_zero_and_negative_lengths(cluster: int, seed: int) -> None:
    lengths = [-(2**31), -3, 0, 1, 7, 511, 512, 513, 514, 520, 1023, 4096, 4097, 8191, 8192, 8193, 2**31 - 1]
    logits = make_rows("random", len(lengths), 40_000, seed, "cuda")
    out = run(variant(512, cluster), logits, int32(lengths))
    assert (out[:3] == -1).all()
    assert torch.equal(out[5], torch.cat([torch.arange(511, device="cuda"), int32([-1])]).int())
    check(variant(512, cluster), logits, int32(lengths).clamp(max=40_000))


def test_columns_past_the_length_are_never_candidates(seed: int) -> None:
    logits = make_rows("random", 4, 50_000, seed, "cuda").clone()
    lengths = int32([1000, 8191, 8193, 49_999])
    for row, length in enumerate(lengths.tolist()):
        logits[row, length:] = float("nan")
    out = topk.decode_topk(logits, lengths, 512)
    assert (out < lengths[:, None]).all()
    assert not logits.gather(1, out.long()).isnan().any()


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_row_counts(rows: int, seed: int) -> None:
    logits = make_rows("random", rows, 16_392, seed, "cuda")
    lengths = torch.randint(0, 16_393, (rows,), dtype=torch.int32, device="cuda")
    out = topk.decode_topk(logits, lengths, 1024)
    assert reference.explain_mismatch(reference.valid_keys(logits, lengths), 1024, out) is None


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("kind", ["random", "constant", "rising"])
def test_the_widest_buffers(kind: str, rows: int, seed: int) -> None:
    logits = make_rows(kind, 1, 1 << 20, seed, "cuda").expand(rows, 1 << 20).contiguous()
    lengths = torch.randint(1, 1 << 20, (rows,), dtype=torch.int32, device="cuda")
    lengths[0] = 1 << 20
    out = topk.decode_topk(logits, lengths, 2048)
    for row in {0, rows // 2, rows - 1}:
        keys = reference.valid_keys(logits[row : row + 1], lengths[row : row + 1])
        assert reference.explain_mismatch(keys, 2048, out[row : row + 1]) is None


def test_offsets_beyond_two_gib(seed: int) -> None:
    stride = (1 << 20) + 64
    buffer = torch.empty(1100, stride, dtype=torch.bfloat16, device="cuda")
    logits = buffer[::8][:137, : 1 << 20]
    logits[-2:].normal_()
    lengths = torch.zeros(137, dtype=torch.int32, device="cuda")
    lengths[-2:] = 1 << 20
    out = topk.decode_topk(logits, lengths, 512)
    keys = reference.valid_keys(logits[-2:], lengths[-2:])
    assert reference.explain_mismatch(keys, 512, out[-2:]) is None
    assert (out[:-2] == -1).all()


def test_strides_of_output_and_input(seed: int) -> None:
    logits = make_rows("random", 3, 9001, seed, "cuda", stride=9024)
    out = torch.full((3, 600), -7, dtype=torch.int32, device="cuda")
    topk.decode_topk(logits, int32([9001, 100, 9000]), 512, out[:, :512])
    keys = reference.valid_keys(logits, int32([9001, 100, 9000]))
    assert reference.explain_mismatch(keys, 512, out[:, :512].contiguous()) is None
    assert (out[:, 512:] == -7).all()


@pytest.mark.parametrize(("rows", "replays"), [(3, 5000), (24, 500), pytest.param(3, 100_000, marks=pytest.mark.slow)])
def test_graph_replays_with_changing_lengths(rows: int, replays: int, seed: int) -> None:
    """20 back-to-back calls a replay, lengths drawn on the device inside the graph; mismatches are counted there."""
    columns, k, calls = 16_384, 512, 20
    generator = torch.Generator("cpu").manual_seed(seed)
    logits = make_rows("random", rows, columns, seed, "cuda")
    table = torch.randint(-5, columns + 1, (64, rows), generator=generator, dtype=torch.int32)
    table[::7, 0] = table[::5, 0].clamp(max=k)[: len(table[::7])]
    table = table.cuda()
    wanted = torch.stack([reference.select_values(reference.valid_keys(logits, one), k) for one in table])
    keys = torch.nn.functional.pad(reference.order_keys(logits), (0, 1))
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    lengths = torch.empty(rows, dtype=torch.int32, device="cuda")
    outs = [torch.empty(rows, k, dtype=torch.int32, device="cuda") for _ in range(calls)]
    topk.decode_topk(logits, lengths.zero_(), k, outs[0])

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # index_select: indexing by a tensor of one element would wait for its value.
        lengths.copy_(table.index_select(0, step % 64)[0])
        for out in outs:
            topk.decode_topk(logits, lengths, k, out)
        for out in (outs[0], outs[-1]):
            chosen = keys.gather(1, torch.where(out < 0, columns, out).long()).sort(dim=1, descending=True).values
            bad += (chosen != wanted.index_select(0, step % 64)[0]).any()
        step += 1
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert int(step) == replays
    assert int(bad) == 0


@pytest.mark.parametrize("rows", [2, 5, 12])
def test_sharded_over_virtual_ranks(rows: int, seed: int) -> None:
    world_size, k = 4, 512
    logits = make_rows("random", rows, 32_768, seed, "cuda")
    lengths = torch.randint(0, 32_769, (rows,), dtype=torch.int32, device="cuda")
    # Loads every kernel before any rank waits for another.
    wanted = topk.decode_topk(logits, lengths, k, deterministic=True)
    share = rows_per_rank(rows, world_size)
    for part in {1, share}:
        topk.decode_topk(logits[:part], lengths[:part], k, deterministic=True)
    local = [torch.zeros(share, k, dtype=torch.int32, device="cuda").fill_(-1) for _ in range(world_size)]
    gathered = [torch.zeros(world_size, share, k, dtype=torch.int32, device="cuda") for _ in range(world_size)]
    results: dict[int, torch.Tensor] = {}

    def call(comm: nvcomm.Communicator) -> None:
        r = comm.rank
        results[r] = sharded_topk(comm, logits, lengths, k, deterministic=True, local=local[r], gathered=gathered[r])

    with nvcomm.virtual_world(world_size) as world:
        for _ in range(5):
            world.run(call)
        torch.cuda.synchronize()
    for result in results.values():
        assert torch.equal(result, wanted)
