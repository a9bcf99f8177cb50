# SPDX-License-Identifier: Apache-2.0
"""The top-k kernel's PTX on the CPU: warps in random order, CTAs that begin late, late stores."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from decode.reference import topk as reference
from decode.topk_config import MAX_ROWS, UNROLL, VECTOR_COLUMNS, TopkConfig, choose_config
from decode.topk_kernel import TopkKernel
from nvcomm import jit
from tests.emulator.machine import Machine
from tests.emulator.memory import Memory
from tests.emulator.program import Launch, Program
from tests.topk_data import KINDS, make_rows

FAKE_ARGS = (*[Int64(0)] * 5, *[Int32(1)] * 3, make_fake_stream())
# Few threads: the same code in a fraction of the time.
SMALL = TopkConfig(512, 4, batches=8, threads=128)
VARIANTS = [
    TopkConfig(512, 1, batches=8, threads=128),
    TopkConfig(2048, 2, batches=8, threads=128),
    TopkConfig(1024, 8, batches=2, threads=256),
    TopkConfig(512, 2, batches=8, threads=64, deterministic=True),
    TopkConfig(2048, 4, batches=8, threads=128, mode="blocks"),
    TopkConfig(2048, 1, batches=8, threads=256, mode="blocks"),
]


@functools.cache
def ptx_of(config: TopkConfig) -> str:
    return jit.artifacts(TopkKernel(config), *FAKE_ARGS, arch="sm_90a").ptx


@functools.cache
def emulated(config: TopkConfig) -> Program:
    return Program(ptx_of(config))


def run(program, config, logits, lengths, seed=0, *, visible=None):
    """`visible`: all of the logits that may be read, if not all."""
    rows, columns = logits.shape
    memory = Memory(seed)
    logits_at = memory.allocate(whole_extent(logits if visible is None else visible), writable=False)
    lengths_at = memory.allocate(lengths.numpy(), writable=False)
    out = torch.full((rows, config.k), -7, dtype=torch.int32)
    out_at = memory.allocate(out.numpy())
    parameters = [logits_at, lengths_at, out_at, logits.stride(0) * 2, out.stride(0) * 4, columns, 1, 0]
    grid, shared_bytes = (rows * config.cluster, 1, 1), TopkKernel(config).layout.total_bytes
    Machine(memory, seed).run([[Launch(program, parameters, grid, config.threads, config.cluster, shared_bytes)]])
    return torch.frombuffer(bytearray(memory.bytes_at(out_at, out.nbytes)), dtype=torch.int32).view(out.shape)


def whole_extent(logits):
    """(rows, columns) with a stride -> all bytes from the first element to the last."""
    extent = 1 + sum((n - 1) * s for n, s in zip(logits.shape, logits.stride(), strict=True))
    return logits.as_strided((extent if logits.numel() else 0,), (1,)).view(torch.uint8).numpy()


def complaint(config, logits, lengths, out):
    if config.mode == "blocks":
        keys = reference.block_keys(logits, lengths)
        keys[keys == reference.NEG_INF_KEY] = 0
        newest = (lengths.clamp(0, logits.shape[1]) - 1) // 8
        keys[newest[:, None] == torch.arange(keys.shape[1])] = 1 << 17
        if not torch.equal(out[:, 0], newest):
            return "the newest block is not first"
    else:
        keys = reference.valid_keys(logits, lengths)
    if config.deterministic and not torch.equal(out, reference.select(keys, config.k)):
        return "not in order, or ties not to the smaller column"
    return reference.explain_mismatch(keys, config.k, out)


def check(config, kind, columns, lengths, seed):
    logits = make_rows(kind, len(lengths), columns, seed, "cpu")
    lengths = torch.tensor(lengths, dtype=torch.int32)
    assert complaint(config, logits, lengths, run(emulated(config), config, logits, lengths, seed)) is None


@pytest.mark.parametrize("kind", list(KINDS))
def test_kinds_of_rows(kind, seed):
    check(SMALL, kind, 12_003, [12_003, 3000, 513, 0], seed)


@pytest.mark.compile_all
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", ["random", "constant", "one_inf"])
def test_variants(config, kind, seed):
    check(config, kind, 20_003, [20_003, config.k + 9], seed)


def test_a_wide_row(seed):
    check(SMALL, "random", 150_001, [150_001], seed)


@pytest.mark.parametrize("config", [SMALL, pytest.param(VARIANTS[3], marks=pytest.mark.compile_all)], ids=str)
def test_candidates_that_overflow_their_list(config, seed):
    """All that is large belongs to one warp of one CTA: fewer groups than its quota, more elements than its list."""
    columns = config.batches * UNROLL * VECTOR_COLUMNS * config.threads * config.cluster - 7
    logits = make_rows("random", 1, columns, seed, "cpu").clone()
    period = config.threads * config.cluster * 8
    large = torch.arange(columns) % period < 256
    logits[0, large] = (logits[0, large].float().abs() + 8).to(torch.bfloat16)
    assert large.sum() > config.candidate_capacity
    lengths = torch.tensor([columns], dtype=torch.int32)
    assert complaint(config, logits, lengths, run(emulated(config), config, logits, lengths, seed)) is None


def row_counts():
    """Every number of rows; without --compile-all the most for each number of CTAs that a row takes."""
    clusters = [choose_config(rows, 16_392, 512).cluster for rows in range(1, MAX_ROWS + 1)]
    for rows, cluster in enumerate(clusters, 1):
        most = rows == MAX_ROWS or clusters[rows] != cluster
        yield pytest.param(rows, cluster, marks=() if most else pytest.mark.compile_all)


@pytest.mark.parametrize(("rows", "cluster"), row_counts())
def test_row_counts(rows, cluster, seed):
    config = TopkConfig(512, cluster, threads=64)
    lengths = torch.randint(0, 601, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    check(config, "random", 600, lengths, seed)


def test_lengths_of_all_sizes(seed):
    lengths = [-5, 1, 511, 512, 513, 519, 520, 1023, 1024, 1025, 2047, 4095, 4096, 4097, 8191, 8193]
    check(SMALL, "random", 8200, lengths, seed)


class FarRows(Memory):
    """Rows of logits and of indices a stride apart, from FAR on; between them there is nothing."""

    FAR = 1 << 40

    def __init__(self, seed, stride):
        super().__init__(seed)
        self.stride, self.near = stride, []

    def place(self, rows):
        """Address of the first row."""
        self.near += [self.allocate(row) for row in rows]
        return self.FAR + (len(self.near) - len(rows)) * self.stride

    def _checked(self, addr, size, right):
        row, offset = divmod(addr.astype(np.int64) - self.FAR, self.stride)
        far = (row >= 0) & (row < len(self.near))
        local = np.array(self.near)[np.where(far, row, 0)] + offset
        return super()._checked(np.where(far, local, addr), size, right)


@pytest.mark.parametrize("stride", [(1 << 31) - 16, 1 << 31, 3 << 30, (5 << 30) + 16])
@pytest.mark.parametrize("config", [SMALL, VARIANTS[4]], ids=["columns", "blocks"])
def test_rows_far_apart(config, stride, seed):
    """Byte offsets have 64 bits: cut to 32, they would lie outside of every allocation."""
    logits, lengths = make_rows("random", 3, 9001, seed, "cpu"), torch.tensor([9001, 7, 5000], dtype=torch.int32)
    memory = FarRows(seed, stride)
    outs = np.full((3, config.k), -7, np.int32)
    places = [memory.place(logits.view(torch.int16).numpy()), memory.allocate(lengths.numpy()), memory.place(outs)]
    parameters = [*places, stride, stride, 9001, 1, 0]
    grid, shared_bytes = (3 * config.cluster, 1, 1), TopkKernel(config).layout.total_bytes
    launch = Launch(emulated(config), parameters, grid, config.threads, config.cluster, shared_bytes)
    Machine(memory, seed).run([[launch]])
    found = [np.frombuffer(memory.bytes_at(at, outs[0].nbytes), np.int32) for at in memory.near[3:]]
    assert complaint(config, logits, lengths, torch.from_numpy(np.stack(found))) is None


@pytest.mark.parametrize("config", [SMALL, VARIANTS[4]], ids=["columns", "blocks"])
@pytest.mark.parametrize("columns", [0, 1, 7, 8, 9])
def test_buffers_of_few_columns(config, columns, seed):
    """Fewer than a vector of 8, or none; lengths beyond the buffer count as all of it."""
    logits = make_rows("random", 3, columns, seed, "cpu", stride=16)
    lengths = torch.tensor([columns, 2**31 - 1, -1], dtype=torch.int32)
    out = run(emulated(config), config, logits, lengths, seed)
    assert torch.equal(
        (out >= 0).sum(1), torch.tensor([-(-columns // 8) if config.mode == "blocks" else columns] * 2 + [0])
    )
    assert complaint(config, logits, lengths.clamp(max=columns), out) is None


def test_nothing_past_the_length_is_needed(seed):
    """The row's last columns share a vector with what lies behind them: they are read one by one."""
    logits = make_rows("random", 1, 9001, seed, "cpu")
    lengths = torch.tensor([9001], dtype=torch.int32)
    out = run(emulated(SMALL), SMALL, logits, lengths, visible=logits[:, :9001])
    assert complaint(SMALL, logits, lengths, out) is None


def test_an_access_past_the_row_is_seen(seed):
    logits = make_rows("random", 1, 9001, seed, "cpu")
    lengths = torch.tensor([9001], dtype=torch.int32)
    with pytest.raises(AssertionError, match="load of 2 bytes at .*, outside of every allocation"):
        run(emulated(SMALL), SMALL, logits, lengths, visible=logits[:, :9000])


def without(pattern, which):
    """Removes one match of a statement from the PTX."""

    def mutate(ptx):
        found = list(re.finditer(pattern, ptx))[which]
        return ptx[: found.start()] + ptx[found.end() :]

    return mutate


@pytest.mark.compile_all
@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("the first cluster barrier", without(r"barrier\.cluster\.wait\.acquire\.aligned;", 0)),
        ("the barrier before the largest key", without(r"bar\.sync\s+0;", 0)),
        ("the wait for the bracket", without(r"WAIT:[^}]*", 0)),
        ("the barrier after the harvest", without(r"bar\.sync\s+0;", 2)),
        ("the barrier before the k-th key is known", without(r"bar\.sync\s+0;", 3)),
        ("eight counts", without(r"st\.async\S*\.v4[^;]*;", 0)),
    ],
)
def test_a_missing_step_is_found(name, mutate, seed):
    """Negative control: the same checks must fail, for some order of the warps, without one step of the protocol."""
    assert goes_wrong(SMALL, mutate, [20_003, 3000], 10, seed), f"nobody misses {name}"


def goes_wrong(config, mutate, lengths, orders, seed):
    kernel = Program(mutate(ptx_of(config)))
    logits = make_rows("random", len(lengths), max(lengths), seed, "cpu")
    lengths = torch.tensor(lengths, dtype=torch.int32)
    for order in range(orders):
        try:
            if complaint(config, logits, lengths, run(kernel, config, logits, lengths, order)) is not None:
                return True
        except AssertionError:
            return True
    return False
