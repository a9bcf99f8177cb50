# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA compiles for every architecture, keeps everything in registers, and reads nothing before its PDL wait."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

from cutlass.cute.runtime import make_fake_stream

from decode.kv_cache import BF16, LAYOUTS, PLAIN_FP8, SCALED_FP8
from decode.sparse_mla_kernel import SparseMlaKernel, fake_arguments
from decode.sparse_mla_layout import (
    MAX_CHUNKS,
    SHARED_BYTES_OF_TWO,
    WIDE_CHUNKS,
    WIDE_COLUMNS,
    SparseMlaConfig,
)
from nvcomm import jit

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
TENSOR_ACCESS = re.compile(r"\b(ld\.global|st\.global|cp\.async\.c[ag])\S*")
WAIT = "griddepcontrol.wait"

COMMON = [
    SparseMlaConfig(PLAIN_FP8, 5),
    SparseMlaConfig(PLAIN_FP8, WIDE_CHUNKS, columns=WIDE_COLUMNS),
    SparseMlaConfig(SCALED_FP8, 5, sink=True),
    SparseMlaConfig(BF16, 1),
]
EVERY = [
    SparseMlaConfig(layout, chunks, fp8_query, few_heads, sink)
    for layout, chunks, fp8_query, few_heads, sink in itertools.product(
        LAYOUTS, range(1, MAX_CHUNKS + 1), (False, True), (False, True), (False, True)
    )
    if layout == PLAIN_FP8 or not fp8_query
]
EVERY += [replace(cfg, columns=WIDE_COLUMNS) for cfg in EVERY if cfg.chunks == WIDE_CHUNKS and not cfg.scaled]


def name(cfg):
    flags = [flag for flag in ("fp8_query", "few_heads", "sink") if getattr(cfg, flag)]
    return "-".join([cfg.layout.name, f"{cfg.chunks}x{cfg.columns}", *flags])


def compiled(cfg, arch):
    return jit.artifacts(SparseMlaKernel(cfg), *fake_arguments(), make_fake_stream(), arch=arch)


def check(cfg, arch):
    built = compiled(cfg, arch)
    (usage,) = built.usage.values()
    assert usage.frame_bytes == 0, f"{usage.frame_bytes} bytes of local memory"
    assert usage.registers * 256 * cfg.ctas_per_sm <= 65536
    check_wait_first(built.ptx)
    check_instructions(built.ptx, cfg)


def check_wait_first(ptx):
    """Nothing of a tensor is read or written before the wait (what an earlier kernel wrote is not there yet)."""
    waits = [match.start() for match in re.finditer(re.escape(WAIT), ptx)]
    assert waits, f"no {WAIT}"
    early = [match.group() for match in TENSOR_ACCESS.finditer(ptx) if match.start() < waits[0]]
    assert not early, f"{early[0]} before {WAIT}"


def check_instructions(ptx, cfg):
    """The products are matrix instructions of the right type, and remote shared memory is used only with a cluster."""
    kinds = set(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(\w+)", ptx))
    wanted = {PLAIN_FP8.name: {"f16"}, SCALED_FP8.name: {"f16", "bf16"}, BF16.name: {"bf16"}}
    assert kinds == wanted[cfg.layout.name]
    assert ("mapa" in ptx) == (cfg.chunks > 1)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("cfg", COMMON, ids=name)
def test_compiles(cfg, arch):
    check(cfg, arch)


@pytest.mark.compile_all
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("cfg", EVERY, ids=name)
def test_every_variant_compiles(cfg, arch):
    check(cfg, arch)


def test_wait_check_finds_a_kernel_without_wait():
    with pytest.raises(AssertionError, match="no griddepcontrol.wait"):
        check_wait_first(compiled(replace(COMMON[0], pdl=False), "sm_90a").ptx)


def test_wait_check_finds_an_early_load():
    with pytest.raises(AssertionError, match="ld.global.b32 before"):
        check_wait_first("ld.global.b32 %r1, [%rd1];\ngriddepcontrol.wait;\n")


@pytest.mark.parametrize("cfg", EVERY, ids=name)
def test_shared_memory(cfg):
    """FP8 records leave room for a second CTA on the SM wherever there is a cluster; areas lie in order, aligned."""
    assert cfg.shared_bytes <= 227 * 1024
    if cfg.layout != BF16 and cfg.chunks > 1:
        assert cfg.shared_bytes <= SHARED_BYTES_OF_TWO
    assert all(offset % 16 == 0 for offset in cfg.offsets.values())
    assert list(cfg.offsets.values()) == sorted(cfg.offsets.values())
    assert cfg.unit_slots * cfg.chunks >= cfg.units


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_swizzle_spreads_eight_rows_over_the_banks(layout):
    cfg = SparseMlaConfig(layout, 1)
    for first in range(0, 128, 8):
        for granule in range(cfg.row_granules):
            places = [row * (cfg.row_bytes // 16) + cfg.swizzle(granule, row) for row in range(first, first + 8)]
            assert len({place % 8 for place in places}) == 8
    for row in range(16):
        placed = {cfg.swizzle(granule, row) for granule in range(cfg.row_granules)}
        assert placed == set(range(cfg.row_granules))
