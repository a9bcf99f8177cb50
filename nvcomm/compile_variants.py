# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a deployment loads, by what it was built with: for `nvcomm compile`, and for compile checks.

A kernel is compiled for sizes, not for a call: which of a handful of variants a call takes depends on its rows and on
the GPU's multiprocessors, so all that may come are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nvcomm.env import settings
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Options, Pdl

if TYPE_CHECKING:
    from decode.kv_cache import RecordLayout
    from decode.topk_config import Mode, TopkConfig
    from nvcomm.collectives.all_reduce import ReduceOp
    from nvcomm.collectives.all_reduce_mhc_config import MhcPart, MhcShape
    from nvcomm.collectives.all_reduce_tree import Dtype
    from nvcomm.collectives.mailbox_kernel import MailboxKernel

# Multiprocessors that a GPU of these architectures, or a part of one, may have.
FEWEST_SMS, MOST_SMS = 16, 160


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


def boundary_variants(
    shape: MhcShape,
    parts: tuple[MhcPart, ...],
    world_sizes: Sequence[int],
    options: Options,
    transports: Sequence[str] = ("peer",),
) -> Iterator[Variant]:
    """Every kernel that `Communicator.mhc` loads for this shape and these parts."""
    from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
    from nvcomm.collectives.all_reduce_mhc_launch import kernel_config, kernels_of

    shape.check_parts(parts)
    for world_size in world_sizes:
        layout = MailboxLayout(world_size, options.max_bytes)
        for transport in transports:
            for kernel in kernels_of(parts, options.pdl):
                config = kernel_config(shape, kernel, layout, options, multicast=transport == "multicast")
                protocol = "two-shot" if kernel.two_shot else "LL"
                name = f"all_reduce_mhc {kernel.part} {protocol} {shape.hidden}, {world_size} ranks, {transport}"
                if kernel.pdl != options.pdl:
                    name += f", pdl {kernel.pdl}"
                yield Variant.of(name, AllReduceMhcKernel(config))


def topk_variants(
    columns: int, k: int, *, mode: Mode = "columns", deterministic: bool = False, max_rows: int | None = None
) -> Iterator[Variant]:
    """Every kernel that `decode_topk`, or `decode_topk_blocks`, launches on logits of so many columns.

    Args:
        columns: of the buffer, `logits.shape[1]`.
        k: what is selected.
        mode: "columns" or "blocks".
        deterministic: as for `decode_topk`.
        max_rows: most rows of a call; default: what a call may have.
    """
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from decode.topk_config import MAX_ROWS, choose_config
    from decode.topk_kernel import TopkKernel

    configs: dict[TopkConfig, None] = {}
    for num_sms in range(FEWEST_SMS, MOST_SMS + 1):
        for rows in range(1, (max_rows or MAX_ROWS) + 1):
            config = choose_config(rows, columns, k, mode=mode, deterministic=deterministic, num_sms=num_sms)
            configs.setdefault(config)
    for config in configs:
        what = "top-k blocks" if mode == "blocks" else f"top-k {k}{', in order' if deterministic else ''}"
        name = f"{what} of {columns}, {config.cluster} CTAs of {config.threads} a row, pdl {config.pdl}"
        arguments = ([Int64(0)] * 5, [Int32(1)] * 3)
        yield Variant(name, TopkKernel(config), (*arguments[0], *arguments[1], make_fake_stream()), (config,))


def sparse_mla_variants(layout: RecordLayout, heads: int, *, fp8_query: bool, sink: bool) -> Iterator[Variant]:
    """Every kernel that `sparse_mla` launches on records of this layout, for any number of columns and tokens."""
    from cutlass.cute.runtime import make_fake_stream

    from decode.sparse_mla_kernel import SparseMlaKernel, fake_arguments
    from decode.sparse_mla_layout import MAX_CHUNKS, WIDE_CHUNKS, WIDE_COLUMNS, SparseMlaConfig

    configs = [
        SparseMlaConfig(layout, chunks, fp8_query, few_heads=heads == 8, sink=sink)
        for chunks in range(1, MAX_CHUNKS + 1)
    ]
    if not configs[-1].scaled:
        configs.append(replace(configs[-1], chunks=WIDE_CHUNKS, columns=WIDE_COLUMNS))
    for config in configs:
        query = "fp8" if fp8_query else "bf16"
        name = f"sparse_mla {layout.name}, {query} query, {heads} heads, {config.chunks} x {config.columns} columns"
        name += ", sink" if sink else ""
        yield Variant(name, SparseMlaKernel(config), (*fake_arguments(), make_fake_stream()), (config,))
