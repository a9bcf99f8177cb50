# SPDX-License-Identifier: Apache-2.0
"""The reducing kernels' PTX, run on the CPU: right bits, clean mailboxes, nothing outside of a tensor touched.

Small shapes, in any order of threads and ranks, with words that reach mailboxes late. What only a GPU can show (memory
order, residency, speed) is tested under tests/kernel.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.collectives import reduce_scatter as rs
from nvcomm.collectives.all_reduce import SWITCH_BYTES, choose
from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_ll import AllReduceLLKernel
from nvcomm.collectives.all_reduce_tree import ELEM_BYTES
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.collectives.reduce_scatter import ReduceScatterKernel
from nvcomm.device import FAULT_MISMATCH, FAULT_TIMEOUT
from nvcomm.errors import UsageError
from nvcomm.mailbox import MAX_WORLD_SIZE, MailboxLayout
from nvcomm.options import Options
from nvcomm.reference import collectives as reference
from tests.emulator.ranks import Ranks, program
from tests.reduction_cases import DTYPES, REDUCING, assert_same, inputs


@pytest.mark.parametrize(
    ("dtype", "width", "world_size"),
    [
        ("bf16", 16, 4),
        ("bf16", 2, 3),
        ("fp16", 16, 2),
        ("fp32", 16, 5),
        ("fp32", 4, 2),
        ("bf16", 16, 1),
        ("bf16", 16, 8),
    ],
)
def test_R13_reductions_in_one_mailbox(dtype, width, world_size, seed):
    """Both protocols and reduce-scatter in turn, growing and shrinking, in grids of one and of two CTAs."""
    layout = MailboxLayout(world_size, 4096)
    config = ReduceConfig(layout, dtype, width, threads=64)
    ranks, calls, elem = Ranks(layout, seed, late=True), 0, ELEM_BYTES[dtype]
    offset = 0 if width == 16 else elem
    for call, chunks in enumerate((1, 40, 3, 150, 2)):
        count = chunks * 16 // elem - (0 if width == 16 else 1)
        xs = inputs(world_size, count, DTYPES[dtype], seed + call)
        want = reference.all_reduce(xs)
        sources = [ranks.put(x, offset) for x in xs]
        for kernel in REDUCING.values():
            outs = [ranks.put(torch.zeros_like(x), offset) for x in xs]
            ranks.run_together(
                [
                    ranks.reduce_launch(kernel, config, r, sources[r], outs[r], [want.nbytes], 1 + call % 2)
                    for r in range(world_size)
                ]
            )
            assert_same([ranks.get(out, want) for out in outs], want)
            calls += 1
        row = 1 if width != 16 else 16 // elem
        if count % row == 0:
            parts = reference.reduce_scatter([x.view(-1, row) for x in xs])
            outs = [ranks.put(torch.zeros_like(part), offset) if part.numel() else 0 for part in parts]
            sizes = [count // row, row * elem]
            ranks.run_together(
                [
                    ranks.reduce_launch(ReduceScatterKernel, config, r, sources[r], outs[r], sizes, 1 + call % 2)
                    for r in range(world_size)
                ]
            )
            for out, part in zip(outs, parts, strict=True):
                assert_same([ranks.get(out, part)], part)
            calls += 1
    ranks.assert_clean(calls)


def test_auto_switches_where_the_table_says():
    assert sorted(SWITCH_BYTES) == list(range(1, MAX_WORLD_SIZE + 1))
    for world_size, switch in SWITCH_BYTES.items():
        sizes = (1, switch - 1, switch, 2 * switch)
        assert [choose("auto", size, world_size) for size in sizes] == ["ll", "ll", "two_shot", "two_shot"]
        for protocol in REDUCING:
            assert all(choose(protocol, size, world_size) == protocol for size in sizes)
    with pytest.raises(UsageError, match=r"max_bytes is"):  # two ranks never switch: no call is so large
        Options(max_bytes=SWITCH_BYTES[2])
    with pytest.raises(UsageError, match=r"protocol is 'ring'; wanted: one of \('auto', 'll', 'two_shot'\)"):
        choose("ring", 16, 4)


def chain_of_calls(ranks: Ranks, config: ReduceConfig, seed: int) -> tuple[list[list], list]:
    """For each rank calls of every kind and of changing sizes; and (address, what has to be there) of every output."""
    world_size = config.world_size
    chains: list[list] = [[] for _ in range(world_size)]
    wanted = []
    for call in range(8):
        rows = (1, 6, 2, 1, 9, 1, 1, 3)[call]
        xs = [x.view(rows, 8) for x in inputs(world_size, rows * 8, torch.bfloat16, seed + call)]
        total, parts = reference.all_reduce(xs), reference.reduce_scatter(xs)
        kernel = (ReduceScatterKernel, AllReduceLLKernel, AllReduceTwoShotKernel)[call % 3]
        for rank, chain in enumerate(chains):
            want = parts[rank] if kernel is ReduceScatterKernel else total
            out = ranks.put(torch.zeros_like(want)) if want.numel() else 0
            sizes = [rows, 16] if kernel is ReduceScatterKernel else [rows * 16]
            chain.append(ranks.reduce_launch(kernel, config, rank, ranks.put(xs[rank]), out, sizes, 1))
            if want.numel():
                wanted.append((out, want))
    return chains, wanted


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_R12_a_rank_far_behind_is_not_lapped(slow, seed):
    """Calls of all kinds one behind the other, in two of three reduce-scatters with ranks that own nothing."""
    ranks = Ranks(MailboxLayout(3, 4096), seed, late=True)
    chains, wanted = chain_of_calls(ranks, ReduceConfig(ranks.layout, "bf16", threads=32), seed)
    ranks.run(chains, slow)
    for out, want in wanted:
        assert_same([ranks.get(out, want)], want)
    ranks.assert_clean(8)


def test_R12_off_a_rank_far_behind_is_lapped(monkeypatch, seed):
    """Negative control: without the token, who owns nothing waits for nobody, and laps the slow rank."""
    monkeypatch.setattr(rs, "num_chunks_of", lambda num_bytes: (num_bytes + 15) // 16)
    program.cache_clear()
    ranks = Ranks(MailboxLayout(2, 4096), seed)
    config = ReduceConfig(ranks.layout, "bf16", threads=32)
    chains: list[list] = [[], []]
    wanted = []
    for call in range(6):
        xs = [x.view(1, 8) for x in inputs(2, 8, torch.bfloat16, seed + call)]
        out = ranks.put(torch.zeros_like(xs[0]))
        for rank in range(2):
            source = ranks.put(xs[rank])
            grid = ranks.reduce_launch(ReduceScatterKernel, config, rank, source, out if rank == 0 else 0, [1, 16], 1)
            chains[rank].append(grid)
        wanted.append((out, reference.all_reduce(xs)))
    program.cache_clear()

    def run() -> None:
        ranks.run(chains, slow=0, limit=100_000)
        for out, want in wanted:
            assert_same([ranks.get(out, want)], want)

    with pytest.raises(AssertionError, match=r"wrong|never publishes"):
        run()


@pytest.mark.parametrize(("protocol", "waited_for"), [("ll", {0: 1, 2: 1}), ("two_shot", {0: 1, 2: 0})])
def test_R10_a_rank_that_does_not_come_is_named(protocol, waited_for, seed):
    """Who waits in vain says for whom, fills with NaN and ends; the next call only fills.

    By two-shot rank 2 waits for rank 0, the owner of all chunks, which waits for rank 1.
    """
    kernel = REDUCING[protocol]
    layout = MailboxLayout(3, 4096)
    config = ReduceConfig(layout, "bf16", threads=32)
    ranks = Ranks(layout, seed, timeout_ns=300_000)
    x = torch.ones(32).bfloat16()
    for then in ("time out", "broken"):
        outs = [ranks.put(torch.zeros_like(x)) for _ in range(3)]
        ranks.run_together(
            [ranks.reduce_launch(kernel, config, r, ranks.put(x), outs[r], [x.nbytes], 1) for r in (0, 2)]
        )
        for rank in (0, 2):
            assert ranks.fault(rank)[:5] == [FAULT_TIMEOUT, rank, waited_for[rank], 0, 0]
            seen = ranks.get(outs[rank], x)
            assert seen.isnan().all() if then == "time out" else (seen.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("kernel", [*REDUCING.values(), ReduceScatterKernel])
def test_R11_device_checks_compare_what_ranks_call(kernel, seed):
    layout = MailboxLayout(2, 4096)
    config = ReduceConfig(layout, "bf16", threads=32, device_checks=True)
    ranks, xs = Ranks(layout, seed, late=True), inputs(2, 256, torch.bfloat16, seed)
    sizes = [2, 256] if kernel is ReduceScatterKernel else [512]
    sources, outs = [ranks.put(x) for x in xs], [ranks.put(torch.zeros_like(x)) for x in xs]

    def run(tags: tuple[int, int], launch: int) -> None:
        ranks.run_together(
            [
                ranks.reduce_launch(kernel, config, r, sources[r], outs[r], sizes, 2, (launch, 7, tags[r]))
                for r in range(2)
            ]
        )

    run((5, 5), 1)
    run((6, 6), 2)
    ranks.assert_clean(2)
    run((5, 6), 3)
    assert {ranks.fault(rank)[0] for rank in range(2)} == {FAULT_MISMATCH}


def test_the_machine_sees_a_wrong_order_of_addition(seed):
    """Negative control: four ranks in another order give other bits, and the comparison says so."""
    layout = MailboxLayout(4, 4096)
    config = ReduceConfig(layout, "fp32", threads=64)
    generator = torch.Generator().manual_seed(seed)
    ranks, xs = Ranks(layout, seed, late=True), [torch.randn(256, generator=generator) for _ in range(4)]
    outs = [ranks.put(torch.zeros_like(x)) for x in xs]
    exchanged = [ranks.put(xs[r]) for r in (0, 2, 1, 3)]
    ranks.run_together(
        [ranks.reduce_launch(AllReduceLLKernel, config, r, exchanged[r], outs[r], [xs[0].nbytes], 1) for r in range(4)]
    )
    with pytest.raises(AssertionError, match="wrong"):
        assert_same([ranks.get(outs[0], xs[0])], reference.all_reduce(xs))


def test_the_machine_sees_a_rank_that_does_not_come(seed):
    layout = MailboxLayout(2, 4096)
    config = ReduceConfig(layout, "bf16", threads=32)
    ranks = Ranks(layout, seed, late=True)
    x = ranks.put(torch.zeros(64).bfloat16())
    grid = ranks.reduce_launch(AllReduceLLKernel, config, 0, x, ranks.put(torch.zeros(64).bfloat16()), [128], 1)
    with pytest.raises(AssertionError, match="never publishes"):
        ranks.run([[grid]], limit=20_000)


def test_the_machine_sees_an_access_outside_of_a_tensor(seed):
    layout = MailboxLayout(1, 4096)
    config = ReduceConfig(layout, "bf16", threads=32)
    ranks = Ranks(layout, seed, late=True)
    short = ranks.put(torch.zeros(56).bfloat16())
    with pytest.raises(AssertionError, match="outside"):
        ranks.run_together(
            [ranks.reduce_launch(AllReduceLLKernel, config, 0, short, ranks.put(torch.zeros(64)), [128], 1)]
        )
