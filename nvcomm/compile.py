# SPDX-License-Identifier: Apache-2.0
"""`nvcomm compile`: fills the compile cache for an architecture, on a machine that need not have a GPU.

A communicator then finds its kernels in the cache and starts without a compiler run. What is compiled depends on
`max_bytes`, `pdl`, the transport and the number of ranks, so give the ones that communicators will be built with, and
the same NVCOMM_DEVICE_CHECKS. Fused kernels depend on a model's sizes and are compiled when they are prepared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from nvcomm.env import settings
from nvcomm.errors import NvcommError, UnsupportedError
from nvcomm.mailbox import MAX_WORLD_SIZE, MailboxLayout
from nvcomm.options import DEFAULT_MAX_BYTES, Options, Pdl

if TYPE_CHECKING:
    from nvcomm.collectives.all_reduce import ReduceOp
    from nvcomm.collectives.all_reduce_tree import Dtype
    from nvcomm.collectives.mailbox_kernel import MailboxKernel

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
OPS = ("all_gather", "all_reduce", "reduce_scatter")
TRANSPORTS = ("peer", "multicast")
EXIT_USAGE, EXIT_UNSUPPORTED = 2, 77


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile: what `jit.compile_kernel` takes, and a name for people."""

    name: str
    kernel: Any
    fake_args: tuple[Any, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, kernel: MailboxKernel) -> Variant:
        """A mailbox kernel, as its engine loads it."""
        return cls(name, kernel, kernel.fake_args(), (kernel.config,))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles; returns 0, 2 for a usage error, 77 where the DSL is not installed."""
    options = _parse(argv)
    try:
        from nvcomm import jit

        for arch in options.arch:
            # jit.target_arch() reads it: compile for this architecture instead of the GPU's own.
            os.environ["CUTE_DSL_ARCH"] = arch
            for variant in _wanted(options):
                started = time.monotonic()
                compiled = jit.compile_kernel(variant.kernel, *variant.fake_args, key=variant.key)
                print(
                    f"{arch:8} {variant.name:62} {time.monotonic() - started:5.1f} s  {compiled.name[-12:]}", flush=True
                )
    except ImportError as error:
        print(f"nvcomm compile: {error}. Install the compiler with: pip install 'nvcomm[cu13]'", file=sys.stderr)
        return EXIT_UNSUPPORTED
    except NvcommError as error:
        print(f"nvcomm compile: {error}", file=sys.stderr)
        return EXIT_UNSUPPORTED if isinstance(error, UnsupportedError) else EXIT_USAGE
    print(f"in {settings().cache_dir}")
    return 0


def variants(
    world_sizes: Sequence[int], max_bytes: int, pdl: Pdl = "safe", transports: Sequence[str] = ("peer",)
) -> Iterator[Variant]:
    """Every all-gather kernel that a communicator of one of these kinds loads when it is built."""
    from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
    from nvcomm.collectives.engine import THREADS
    from nvcomm.collectives.tensors import ACCESS_BYTES

    checks = settings().device_checks > 0
    for world_size in world_sizes:
        layout = MailboxLayout(world_size, max_bytes)
        for transport in transports:
            for width in ACCESS_BYTES:
                config = AllGatherConfig(layout, width, transport == "multicast", pdl, THREADS, checks)
                name = f"all_gather {world_size} ranks, {transport}, {width}-byte accesses"
                yield Variant.of(name, AllGatherKernel(config))


def reset_variants(world_sizes: Sequence[int], max_bytes: int) -> Iterator[Variant]:
    """The kernel that a communicator which publishes by multicast loads for `reset()`, when it is built."""
    from nvcomm.collectives.engine import THREADS
    from nvcomm.collectives.marker import MarkerConfig, MarkerKernel, fake_args

    for world_size in world_sizes:
        config = MarkerConfig(MailboxLayout(world_size, max_bytes), multicast=True, threads=THREADS)
        yield Variant(f"reset {world_size} ranks, multicast", MarkerKernel(config), fake_args(world_size), (config,))


def reducing_variants(
    op: ReduceOp, dtype: Dtype, world_sizes: Sequence[int], options: Options, transports: Sequence[str] = ("peer",)
) -> Iterator[Variant]:
    """Every kernel that `op` on `dtype` loads when it is prepared."""
    from nvcomm.collectives.all_reduce import kernel_config, kernel_keys

    for world_size in world_sizes:
        layout = MailboxLayout(world_size, options.max_bytes)
        for transport in transports:
            for kernel, _, width in kernel_keys(op, dtype):
                config = kernel_config(kernel, dtype, width, layout, options, multicast=transport == "multicast")
                name = f"{kernel.__name__} {dtype} {world_size} ranks, {transport}, {width}-byte accesses"
                yield Variant.of(name, kernel(config))


def _wanted(options: argparse.Namespace) -> Iterator[Variant]:
    if "all_gather" in options.op:
        yield from variants(options.world_size, options.max_bytes, options.pdl, options.transport)
        if "multicast" in options.transport:
            yield from reset_variants(options.world_size, options.max_bytes)
    chosen = Options(max_bytes=options.max_bytes, pdl=options.pdl)
    for op in options.op:
        for dtype in options.dtype if op != "all_gather" else ():
            yield from reducing_variants(op, dtype, options.world_size, chosen, options.transport)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nvcomm compile",
        description="Compile kernels into the cache. Options that have no single default may be given several times.",
    )
    parser.add_argument("--arch", action="append", choices=ARCHES, required=True, help="the GPU's architecture")
    parser.add_argument("--op", action="append", choices=OPS, help="if none is given: all")
    parser.add_argument(
        "--dtype", action="append", choices=("bf16", "fp16", "fp32"), help="of reductions; if none: bf16"
    )
    parser.add_argument(
        "--world-size",
        action="append",
        type=int,
        choices=range(1, MAX_WORLD_SIZE + 1),
        help="number of ranks; if none is given: each of them",
    )
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="if none is given: both")
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="of the communicator (default: %(default)s)"
    )
    parser.add_argument(
        "--pdl", choices=get_args(Pdl), default="safe", help="of the communicator (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    options.op = options.op or list(OPS)
    options.dtype = options.dtype or ["bf16"]
    options.world_size = options.world_size or list(range(1, MAX_WORLD_SIZE + 1))
    options.transport = options.transport or list(TRANSPORTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
