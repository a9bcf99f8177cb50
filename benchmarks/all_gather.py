# SPDX-License-Identifier: Apache-2.0
"""All-gather in the virtual world, beside the floor: the same loads, stores and clears, waiting for nobody.

    python -m benchmarks.all_gather [--ranks 4] [--sizes 16 1024 65536 1048576 4194304]

Caches as in use: the same buffers at every call. Data is checked before and after the timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import date

import torch

import nvcomm
from benchmarks.gather_floor import GatherFloor
from benchmarks.graphs import RankGraphs, capture, median_us
from nvcomm.env import settings
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Pdl

# What a call with an early trigger may take on an H200, us: by size, and from 1 MiB on as a multiple of the floor.
BARS_US = {16: 1.9, 1024: 2.0, 65536: 2.8}
LARGE_BYTES, LARGE_TIMES_FLOOR = 1 << 20, 1.25
SIZES = (16, 1024, 16384, 65536, 262144, 1 << 20, 4 << 20)


def tensors(ranks: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random inputs and zeroed outputs of `size` bytes a rank."""
    words = [torch.randint(0, 2**31 - 1, (-(-size // 4),), dtype=torch.int32, device="cuda") for _ in range(ranks)]
    outs = [torch.zeros((ranks, size), dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    return [x.view(torch.uint8)[:size] for x in words], outs


def calls_for(size: int) -> int:
    """Calls in a graph: enough that launching it costs nothing beside them."""
    return 200 if size <= 1 << 16 else 20


def measure(ranks: int, sizes: list[int], pdl: Pdl, max_bytes: int, share: float) -> Iterator[float]:
    """Median us of a call, size by size."""
    with nvcomm.virtual_world(ranks, pdl=pdl, max_bytes=max_bytes, timeout_s=5, device_share=share) as world:
        for size in sizes:
            xs, outs = tensors(ranks, size)
            graphs = RankGraphs(
                world, lambda comm, xs=xs, outs=outs: comm.all_gather(xs[comm.rank], outs[comm.rank]), calls_for(size)
            )
            _check(world, graphs, xs, outs)
            yield graphs.median_us()
            _check(world, graphs, xs, outs)


def _check(
    world: nvcomm.virtual.VirtualWorld, graphs: RankGraphs, xs: list[torch.Tensor], outs: list[torch.Tensor]
) -> None:
    for out in outs:
        out.zero_()
    torch.cuda.synchronize()
    graphs.replay()
    torch.cuda.synchronize()
    for comm in world:
        comm.check()
    if not all(torch.equal(out, torch.stack(xs)) for out in outs):
        raise SystemExit(f"wrong data at {xs[0].nbytes} bytes")


def measure_floor(ranks: int, sizes: list[int], max_bytes: int) -> Iterator[float]:
    """Median us of the floor, the best of three grids."""
    for size in sizes:
        xs, outs = tensors(ranks, -(-size // 16) * 16)
        layout, best = MailboxLayout(ranks, max_bytes), float("inf")
        for ctas in (33, 66, 132):
            floor = GatherFloor(xs, outs, layout, ctas)
            graph = capture(floor.call, calls_for(size), torch.cuda.Stream())
            best = min(best, median_us(graph.replay, calls_for(size)))
        yield best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--share", type=float, default=1.0, help="device_share: nothing else runs on this GPU")
    parser.add_argument("--max-bytes", type=int, default=4 << 20)
    options = parser.parse_args()
    ranks, sizes, max_bytes = options.ranks, options.sizes, options.max_bytes
    print(f"# {torch.cuda.get_device_name()}, {date.today()}, torch {torch.__version__}, {ranks} virtual ranks,")
    print(f"# device_share {options.share}, NVCOMM_DEVICE_CHECKS={settings().device_checks}")
    early = list(measure(ranks, sizes, "early", max_bytes, options.share))
    safe = list(measure(ranks, sizes, "safe", max_bytes, options.share))
    floor = list(measure_floor(ranks, sizes, max_bytes))
    print("| bytes a rank | early trigger, us | trigger at the end, us | floor, us | early / floor | bar, us | met |")
    print("|---|---|---|---|---|---|---|")
    for size, ours, late, least in zip(sizes, early, safe, floor, strict=True):
        bar = bar_us(size, least) if ranks == 4 else None
        judged = f"{bar:.2f} | {'yes' if ours <= bar else 'no'}" if bar else "- | -"
        print(f"| {size} | {ours:.2f} | {late:.2f} | {least:.2f} | {ours / least:.2f} | {judged} |")


def bar_us(size: int, floor_us: float) -> float | None:
    """What four ranks on one H200 may take; None where there is no bar."""
    return LARGE_TIMES_FLOOR * floor_us if size >= LARGE_BYTES else BARS_US.get(size)


if __name__ == "__main__":
    main()
