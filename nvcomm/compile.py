# SPDX-License-Identifier: Apache-2.0
"""`nvcomm compile`: fills the compile cache for an architecture, on a machine that need not have a GPU.

A communicator, and the decode kernels, then find what they launch in the cache and start without a compiler run. What
is compiled depends on `max_bytes`, `pdl`, the transport and the number of ranks, so give the ones that communicators
will be built with, and the same NVCOMM_DEVICE_CHECKS; what depends on a model's sizes is compiled where it is asked
for by `--op`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from decode.topk_config import MAX_COLUMNS, MAX_ROWS, NUM_BLOCKS_SELECTED, SUPPORTED_K
from nvcomm import log
from nvcomm.collectives.all_reduce_mhc_config import MhcPart, MhcShape
from nvcomm.compile_variants import (
    Variant,
    boundary_variants,
    reducing_variants,
    reset_variants,
    sparse_mla_variants,
    topk_variants,
    variants,
)
from nvcomm.env import settings
from nvcomm.errors import NvcommError, UnsupportedError
from nvcomm.mailbox import MAX_WORLD_SIZE
from nvcomm.options import DEFAULT_MAX_BYTES, Options, Pdl

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
OPS = (*COLLECTIVES, "all_reduce_mhc", "topk", "topk_blocks", "sparse_mla")
KV_LAYOUTS = ("plain_fp8", "bf16", "scaled_fp8")
TRANSPORTS = ("peer", "multicast")
EXIT_USAGE, EXIT_UNSUPPORTED = 2, 77

EPILOG = """\
what a deployment of four ranks uses, for a model of hidden size 5120 with an indexer over at most 524288 columns:
  nvcomm compile --arch sm_103a --world-size 4 --op all_gather all_reduce all_reduce_mhc topk topk_blocks sparse_mla \\
    --hidden 5120 --columns 524288
exit codes: 0 ok; 2 usage; 77 the compiler is not installed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles; returns 0, 2 for a usage error, 77 where the DSL is not installed."""
    options = _parse(argv)
    try:
        log.configure()
        found: dict[object, Variant] = {}
        for variant in _wanted(options):  # what two transports share is compiled once
            found.setdefault((type(variant.kernel), variant.key), variant)
        wanted = list(found.values())
        total = len(options.arch) * len(wanted)
        for number, (arch, variant) in enumerate(itertools.product(options.arch, wanted), 1):
            print(f"{arch:8} {number:{len(str(total))}}/{total} {variant.name:66}", end="", flush=True)
            print("" if options.dry_run else _made(arch, variant), flush=True)
    except ImportError as error:
        print(f"nvcomm compile: {error}. Install the compiler with: pip install 'nvcomm[cu13]'", file=sys.stderr)
        return EXIT_UNSUPPORTED
    except NvcommError as error:
        print(f"nvcomm compile: {error}", file=sys.stderr)
        return EXIT_UNSUPPORTED if isinstance(error, UnsupportedError) else EXIT_USAGE
    print("nothing was compiled" if options.dry_run else f"in {settings().cache_dir}")
    return 0


def _made(arch: str, variant: Variant) -> str:
    """Compiles one kernel, and says in how many seconds, and which entry of the cache it is."""
    from nvcomm import jit

    # jit.target_arch() reads it: compile for this architecture instead of the GPU's own.
    os.environ["CUTE_DSL_ARCH"] = arch
    started = time.monotonic()
    compiled = jit.compile_kernel(variant.kernel, *variant.fake_args, key=variant.key)
    return f" {time.monotonic() - started:5.1f} s  {compiled.name[-12:]}"


def _wanted(options: argparse.Namespace) -> Iterator[Variant]:
    worlds, transports = options.world_size, options.transport
    chosen = Options(max_bytes=options.max_bytes, pdl=options.pdl)
    if "all_gather" in options.op:
        yield from variants(worlds, options.max_bytes, options.pdl, transports)
        if "multicast" in transports:
            yield from reset_variants(worlds, options.max_bytes)
    sums: tuple[ReduceOp, ...] = ("all_reduce", "reduce_scatter")
    for op, dtype in itertools.product(sums, options.dtype):
        if op in options.op:
            yield from reducing_variants(op, dtype, worlds, chosen, transports)
    if "all_reduce_mhc" in options.op:
        for hidden in options.hidden:
            shape = MhcShape(hidden, options.num_streams, options.moe_top_k)
            yield from boundary_variants(shape, options.part, worlds, chosen, transports)
    for columns in options.columns:
        for k in options.k if "topk" in options.op else ():
            for deterministic in {False, options.deterministic}:
                yield from topk_variants(columns, k, deterministic=deterministic, max_rows=options.max_rows)
        if "topk_blocks" in options.op:
            yield from topk_variants(columns, NUM_BLOCKS_SELECTED, mode="blocks", max_rows=options.max_rows)
    if "sparse_mla" in options.op:
        from decode.kv_cache import LAYOUTS

        layout = next(one for one in LAYOUTS if one.name == options.kv_layout)
        for sink in (False, True):
            yield from sparse_mla_variants(layout, options.heads, fp8_query=options.query == "fp8", sink=sink)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    options.op = options.op or list(COLLECTIVES)
    options.dtype = options.dtype or ["bf16"]
    options.world_size = options.world_size or list(range(1, MAX_WORLD_SIZE + 1))
    options.transport = options.transport or list(TRANSPORTS)
    options.hidden = options.hidden or []
    options.columns = options.columns or []
    options.k = options.k or [512]
    options.part = tuple(options.part or (("fused", "finalize") if options.moe_top_k else ("fused",)))
    if "all_reduce_mhc" in options.op and not options.hidden:
        parser.error("--op all_reduce_mhc wants --hidden, the values of a row")
    if {"topk", "topk_blocks"} & set(options.op) and not options.columns:
        parser.error("--op topk and topk_blocks want --columns, the width of the buffer of logits")
    if options.heads != 8 and (options.heads < 1 or options.heads % 16):
        parser.error(f"--heads {options.heads}: sparse_mla takes 8, or a multiple of 16")
    return options


def _between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"wanted {least} to {most}, got {text}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nvcomm compile",
        description="Compile kernels into the cache. Options with X take several values.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def several(name: str, **rest: object) -> None:
        group.add_argument(name, action="extend", nargs="+", metavar="X", **rest)  # type: ignore[arg-type]

    group = parser.add_argument_group("what")
    several("--arch", choices=ARCHES, required=True, help=f"of the GPUs: {', '.join(ARCHES)}")
    several(
        "--op", choices=OPS, help=f"{', '.join(OPS)}; if none: the first three. Every communicator loads all_gather"
    )
    group.add_argument("--dry-run", action="store_true", help="list the kernels, and compile none")
    group = parser.add_argument_group("collectives, as their communicators will be built")
    several("--dtype", choices=("bf16", "fp16", "fp32"), help="of sums: bf16, fp16, fp32; if none: bf16")
    several("--world-size", type=_between(1, MAX_WORLD_SIZE), help="ranks; if none: 1 to 8")
    several("--transport", choices=TRANSPORTS, help="peer, multicast; if none: both")
    group.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES, metavar="N", help="default: %(default)s")
    group.add_argument("--pdl", choices=get_args(Pdl), default="safe", help="default: %(default)s")
    group = parser.add_argument_group("all_reduce_mhc, as for Communicator.mhc")
    several("--hidden", type=int, help="values of a row")
    group.add_argument("--num-streams", type=int, default=4, metavar="N", help="default: %(default)s")
    group.add_argument("--moe-top-k", type=int, default=0, metavar="N", help="top_k of mhc(); default: %(default)s")
    several("--part", choices=get_args(MhcPart), help=f"{', '.join(get_args(MhcPart))}; if none: as mhc()")
    group = parser.add_argument_group("topk and topk_blocks, as for decode_topk")
    several("--columns", type=_between(1, MAX_COLUMNS), help="width of the buffer of logits")
    several("--k", type=int, choices=SUPPORTED_K, help="of topk: 512, 1024, 2048; if none: 512")
    group.add_argument("--deterministic", action="store_true", help="also the kernels that break ties by column")
    group.add_argument("--max-rows", type=_between(1, MAX_ROWS), default=MAX_ROWS, metavar="N", help="of a call")
    group = parser.add_argument_group("sparse_mla")
    group.add_argument("--kv-layout", choices=KV_LAYOUTS, default="plain_fp8", help="default: %(default)s")
    group.add_argument("--query", choices=("bf16", "fp8"), default="bf16", help="default: %(default)s")
    group.add_argument("--heads", type=int, default=16, metavar="N", help="of a rank; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
