# SPDX-License-Identifier: Apache-2.0
"""`nvcomm compile`: fills the compile cache for an architecture, on a machine that need not have a GPU.

A communicator then finds its kernels in the cache and starts without a compiler run. What is compiled depends on
`max_bytes`, `pdl` and the number of ranks, so give the ones that the communicators will be built with.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcomm.env import settings
from nvcomm.errors import NvcommError, UnsupportedError
from nvcomm.mailbox import MAX_WORLD_SIZE, MailboxLayout

if TYPE_CHECKING:
    from nvcomm.options import Pdl

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
EXIT_USAGE, EXIT_UNSUPPORTED = 2, 77


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile: what `jit.compile_kernel` takes, and a name for people."""

    name: str
    kernel: Any
    fake_args: tuple[Any, ...]
    key: tuple[Any, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles; returns 0, 2 for a usage error, 77 where the DSL is not installed."""
    options = _parse(argv)
    try:
        from nvcomm import jit

        for arch in options.arch:
            # jit.target_arch() reads it: compile for this architecture instead of the GPU's own.
            os.environ["CUTE_DSL_ARCH"] = arch
            for variant in variants(options.world_size, options.max_bytes, options.pdl, options.transport):
                started = time.monotonic()
                compiled = jit.compile_kernel(variant.kernel, *variant.fake_args, key=variant.key)
                print(
                    f"{arch:8} {variant.name:48} {time.monotonic() - started:5.1f} s  {compiled.name[:32]}", flush=True
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
    """Every kernel that a communicator of one of these kinds loads when it is built."""
    from nvcomm.collectives.all_gather import AllGatherConfig, AllGatherKernel
    from nvcomm.collectives.engine import THREADS, fake_args
    from nvcomm.collectives.tensors import ACCESS_BYTES

    for world_size in world_sizes:
        layout = MailboxLayout(world_size, max_bytes)
        for transport in transports:
            for width in ACCESS_BYTES:
                config = AllGatherConfig(layout, width, transport == "multicast", pdl, THREADS)
                name = f"all_gather {world_size} ranks, {transport}, {width}-byte accesses"
                yield Variant(name, AllGatherKernel(config), fake_args(world_size), (config,))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nvcomm compile", description="Compile every kernel into the cache.")
    parser.add_argument("--arch", action="append", choices=ARCHES, required=True, help="may be given several times")
    parser.add_argument(
        "--world-size",
        action="append",
        type=int,
        choices=range(1, MAX_WORLD_SIZE + 1),
        help="number of ranks; may be given several times; default: all",
    )
    parser.add_argument("--max-bytes", type=int, default=4 << 20, help="the communicator's max_bytes; default: 4 MiB")
    parser.add_argument("--pdl", choices=("off", "safe", "early"), default="safe", help="the communicator's pdl")
    parser.add_argument(
        "--transport",
        action="append",
        choices=("peer", "multicast"),
        help="may be given several times; default: both",
    )
    options = parser.parse_args(argv)
    options.world_size = options.world_size or list(range(1, MAX_WORLD_SIZE + 1))
    options.transport = options.transport or ["peer", "multicast"]
    return options


if __name__ == "__main__":
    sys.exit(main())
