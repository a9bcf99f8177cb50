# SPDX-License-Identifier: Apache-2.0
"""The top-k kernels compile for every architecture, without local memory and with the accesses that they promise."""

from __future__ import annotations

import functools
import re

import pytest

pytest.importorskip("cutlass")

from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from decode.topk_config import (
    MAX_COLUMNS,
    NUM_BLOCKS_SELECTED,
    SUPPORTED_K,
    TopkConfig,
    choose_config,
)
from decode.topk_kernel import TopkKernel
from nvcomm import jit
from nvcomm.cubin import disassemble, find_nvdisasm

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
FAKE_ARGS = (*[Int64(0)] * 5, *[Int32(1)] * 3, make_fake_stream())
SOME = [
    TopkConfig(512, 8, 1),
    TopkConfig(2048, 1, deterministic=True),
    TopkConfig(2048, 2, mode="blocks"),
]
# Everything that the public functions launch on an H200: cluster sizes, threads, with and without PDL.
ALL = list(
    dict.fromkeys(
        choose_config(rows, columns, k, mode=mode, deterministic=deterministic)
        for k in SUPPORTED_K
        for rows in (1, 16, 31, 67)
        for columns in (65_536, 524_288, MAX_COLUMNS)
        for mode in ("columns", "blocks")
        for deterministic in (False, True)
        if mode == "columns" or (k == NUM_BLOCKS_SELECTED and not deterministic)
    )
)


@functools.cache
def compiled(config: TopkConfig, arch: str) -> jit.Artifacts:
    return jit.artifacts(TopkKernel(config), *FAKE_ARGS, arch=arch)


def check(config: TopkConfig, arch: str) -> None:
    made = compiled(config, arch)
    (usage,) = made.usage.values()
    assert usage.frame_bytes == 0, f"{config}: {usage.frame_bytes} bytes of local memory a thread"
    assert usage.registers * config.threads <= 65536
    # Weak accesses alone: what a kernel before wrote is visible after griddepcontrol.wait, and only then.
    body = made.ptx[made.ptx.index(".entry") :]
    assert ("griddepcontrol.wait" in body) == (config.pdl != "off")
    wait = body.index("griddepcontrol.wait") if config.pdl != "off" else 0
    assert "global" not in re.sub(r"//.*", "", body[:wait]), "global memory is touched before griddepcontrol.wait"
    assert not re.search(r"\b(ld|st)\.(relaxed|volatile|acquire|release)\S*\.global", body)
    assert re.search(r"ld\.global\.v4\.b32", body)
    assert not re.search(r"(atom|red)\S*\.global", body), "the output is written once, by plain stores"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("config", SOME, ids=str)
def test_compiles(config, arch):
    check(config, arch)


@pytest.mark.compile_all
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("config", ALL, ids=str)
def test_all_variants_compile(config, arch):
    check(config, arch)


@pytest.mark.skipif(find_nvdisasm() is None, reason="no nvdisasm")
def test_sass_reads_16_bytes_and_keeps_l1():
    """Between the first barrier and the candidates nothing may drop L1: hot batches are read again from it."""
    sass = disassemble(compiled(SOME[0], "sm_90a").cubin)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"LDG\.E\.128", sass)) >= 8
    hot_path = sass[sass.index("CCTL.IVALL") + 1 : sass.rindex("STAS")]
    assert "CCTL.IVALL" not in hot_path
    assert "MEMBAR" not in hot_path
