# SPDX-License-Identifier: Apache-2.0
"""All-reduce and the sublayer boundary in the virtual world, beside `copy` and beside the unfused boundary.

    python -m benchmarks.all_reduce [--op all_reduce|mhc|both] [--rows 1 6 48 192] [--pdl early safe] [--no-unfused]

`copy` is the same kernel that reads once and waits for nobody: the same loads, stores and clears on the same
footprint. Its ranks drift apart, which can make it slower than what it is the floor of. `unfused` is our all-reduce,
then post-mix, collapse and RMSNorm through torch.compile, compiled for each number of rows. Caches as in use: the same
buffers at every call. Data is checked before and after the timing; the copy's is what happens to lie there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date

import torch

import nvcomm
from benchmarks.all_reduce_bars import Figures, all_reduce_table, mhc_table
from benchmarks.graphs import RankGraphs
from nvcomm.bench.boundary import post_collapse_norm
from nvcomm.collectives.all_reduce import SWITCH_BYTES, choose
from nvcomm.collectives.all_reduce_mhc_launch import MHC_SWITCH_BYTES
from nvcomm.options import Pdl, Protocol
from nvcomm.reference import collectives as reference

HIDDEN, STREAMS, EPS = 5120, 4, 1e-20
PROTOCOLS = ("ll", "two_shot")
Call = Callable[[nvcomm.Communicator], object]


@dataclass(frozen=True)
class Setting:
    """What every world of a run has in common."""

    ranks: int
    pdl: Pdl
    share: float
    max_rows: int

    def world(self, protocol: Protocol = "mailbox") -> nvcomm.virtual.VirtualWorld:
        """A virtual world on the current GPU."""
        return nvcomm.virtual_world(
            self.ranks, "cuda", max_bytes=self.max_rows * HIDDEN * 2, timeout_s=5, pdl=self.pdl,
            device_share=self.share, protocol=protocol,
        )  # fmt: skip


@dataclass(frozen=True)
class Boundary:
    """Tensors of a sublayer boundary, for every rank where they differ."""

    xs: list[torch.Tensor]
    residual: list[torch.Tensor]
    post: torch.Tensor
    comb: torch.Tensor
    pre: torch.Tensor
    weight: torch.Tensor
    new_residual: list[torch.Tensor]
    h: list[torch.Tensor]

    @classmethod
    def make(cls, ranks: int, rows: int) -> Boundary:
        residual = torch.randn(rows, STREAMS, HIDDEN, device="cuda").bfloat16()
        xs = inputs(ranks, rows)
        return cls(
            xs,
            [residual.clone() for _ in range(ranks)],
            torch.rand(rows, STREAMS, device="cuda"),
            torch.rand(rows, STREAMS, STREAMS, device="cuda"),
            torch.rand(rows, STREAMS, device="cuda"),
            torch.randn(HIDDEN, device="cuda").bfloat16(),
            [torch.zeros_like(residual) for _ in range(ranks)],
            [torch.zeros_like(x) for x in xs],
        )

    def mixes(self) -> tuple[torch.Tensor, ...]:
        return self.post, self.comb, self.pre, self.weight

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        new_residual, h = reference.all_reduce_mhc(self.xs, self.residual[0], *self.mixes(), EPS)
        assert h is not None
        return new_residual, h

    def is_right(self) -> bool:
        new_residual, h = self.wanted()
        near = all(torch.allclose(one, h, rtol=2**-7, atol=0) for one in self.h)  # one ULP
        take_away(self.h)
        return all_equal(self.new_residual, new_residual) and near


def all_equal(outs: list[torch.Tensor], want: torch.Tensor) -> bool:
    """Whether every rank has found `want`; once, see `take_away`."""
    equal = all(torch.equal(out, want) for out in outs)
    take_away(outs)
    return equal


def take_away(outs: list[torch.Tensor]) -> None:
    """Leaves nothing of what was looked at, so that the next look sees what came since."""
    for out in outs:
        out.zero_()


def inputs(ranks: int, rows: int) -> list[torch.Tensor]:
    """A contribution of every rank."""
    return [torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(ranks)]


def timed(world: nvcomm.virtual.VirtualWorld, call: Call, rows: int, is_right: Callable[[], bool] | None) -> float:
    """Median us of a call, the data checked before and after where `is_right` says how."""
    # calls in a graph: enough that launching it costs nothing beside them
    graphs = RankGraphs(world, call, 200 if rows <= 24 else 100 if rows <= 64 else 32)
    for last in (False, True):
        graphs.replay()
        torch.cuda.synchronize()
        if is_right is not None:
            for comm in world:
                comm.check()
            if not is_right():
                raise SystemExit(f"wrong data at {rows} rows")
        if not last:
            median = graphs.median_us()
    return median


def all_reduce_us(setting: Setting, all_rows: Sequence[int], protocol: Protocol) -> Iterator[list[float]]:
    """LL and two-shot, for each number of rows."""
    with setting.world(protocol) as world:
        world.prepare("all_reduce", torch.bfloat16)
        for rows in all_rows:
            xs = inputs(setting.ranks, rows)
            outs = [torch.zeros_like(x) for x in xs]
            want = reference.all_reduce(xs)

            is_right = functools.partial(all_equal, outs, want)
            yield [
                timed(
                    world,
                    lambda comm, xs=xs, outs=outs, kind=kind: comm.all_reduce(
                        xs[comm.rank], outs[comm.rank], protocol=kind
                    ),
                    rows,
                    is_right if protocol == "mailbox" else None,
                )
                for kind in PROTOCOLS
            ]


def mhc_us(setting: Setting, all_rows: Sequence[int], protocol: Protocol) -> Iterator[list[float]]:
    """The fused boundary by LL and by two-shot, for each number of rows."""
    with setting.world(protocol) as world:
        fused = [comm.mhc(HIDDEN, num_streams=STREAMS) for comm in world]
        for rows in all_rows:
            case = Boundary.make(setting.ranks, rows)

            def call(comm: nvcomm.Communicator, kind: str, case: Boundary = case) -> None:
                rank = comm.rank
                fused[rank](
                    case.xs[rank], case.residual[rank], *case.mixes(), EPS, new_residual=case.new_residual[rank],
                    h=case.h[rank], protocol=kind,
                )  # fmt: skip

            is_right = case.is_right if protocol == "mailbox" else None
            yield [timed(world, lambda comm, kind=kind: call(comm, kind), rows, is_right) for kind in PROTOCOLS]


def unfused_us(setting: Setting, all_rows: Sequence[int]) -> Iterator[float]:
    """Our all-reduce, then `post_collapse_norm` compiled, for each number of rows."""
    compiled = torch.compile(post_collapse_norm, dynamic=False)
    with setting.world() as world:
        world.prepare("all_reduce", torch.bfloat16)
        for rows in all_rows:
            case = Boundary.make(setting.ranks, rows)
            ys = [torch.zeros_like(x) for x in case.xs]
            results = [compiled(y, case.residual[0], *case.mixes()) for y in ys]  # compiles, outside capture

            def call(
                comm: nvcomm.Communicator, case: Boundary = case, ys: list[torch.Tensor] = ys,
                results: list[tuple[torch.Tensor, torch.Tensor]] = results,
            ) -> None:  # fmt: skip
                rank = comm.rank
                comm.all_reduce(case.xs[rank], ys[rank])
                results[rank] = compiled(ys[rank], case.residual[rank], *case.mixes())

            def is_right(case: Boundary = case, results: list[tuple[torch.Tensor, torch.Tensor]] = results) -> bool:
                """Near: the compiler is free to contract, and to round less often."""
                return all(
                    torch.allclose(seen.float(), want.float(), rtol=0.05, atol=0.05)
                    for result in results
                    for seen, want in zip(result, case.wanted(), strict=True)
                )

            yield timed(world, call, rows, is_right)


def figures_of(setting: Setting, all_rows: Sequence[int], op: str, unfused: Sequence[float]) -> list[Figures]:
    """Ours and the copy for each number of rows."""
    measure, switch = {"all_reduce": (all_reduce_us, SWITCH_BYTES), "mhc": (mhc_us, MHC_SWITCH_BYTES)}[op]
    ours, copies = (list(measure(setting, all_rows, kind)) for kind in ("mailbox", "copy"))
    autos = [PROTOCOLS.index(choose("auto", rows * HIDDEN * 2, setting.ranks, switch)) for rows in all_rows]
    return [Figures(*figures) for figures in zip(all_rows, ours, copies, autos, unfused, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=("all_reduce", "mhc", "both"), default="both")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 48, 192])
    parser.add_argument("--pdl", choices=("early", "safe", "off"), nargs="+", default=["early", "safe"])
    parser.add_argument("--share", type=float, default=1.0, help="device_share of the communicators")
    parser.add_argument("--no-unfused", action="store_true", help="without torch.compile, which takes a while")
    options = parser.parse_args()
    print(
        f"# {torch.cuda.get_device_name()}, {date.today()}, torch {torch.__version__}, {options.ranks} virtual ranks, "
        f"device_share {options.share}, bf16, hidden {HIDDEN}"
    )
    none = [float("nan")] * len(options.rows)
    for pdl in options.pdl:
        setting = Setting(options.ranks, pdl, options.share, max(options.rows))
        if options.op != "mhc":
            print(f"\nall-reduce, pdl {pdl}\n", flush=True)
            for line in all_reduce_table(figures_of(setting, options.rows, "all_reduce", none)):
                print(line, flush=True)
        if options.op != "all_reduce":
            unfused = none if options.no_unfused else list(unfused_us(setting, options.rows))
            print(f"\nsublayer boundary, pdl {pdl}\n", flush=True)
            for line in mhc_table(figures_of(setting, options.rows, "mhc", unfused)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
