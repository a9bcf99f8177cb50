# SPDX-License-Identifier: Apache-2.0
"""What `nvcomm compile` makes is what run time looks for: the same entries of the cache, of every operation."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from decode import sparse_mla_launch, topk
from decode.kv_cache import LAYOUTS, record_view
from decode.sparse_mla import ColumnSet
from decode.topk_config import choose_config
from nvcomm import compile as compile_command
from nvcomm import jit
from nvcomm.collectives import all_reduce, all_reduce_mhc_launch
from nvcomm.collectives import engine as engine_module
from nvcomm.collectives.all_reduce_mhc_config import MhcShape
from nvcomm.collectives.tensors import ACCESS_BYTES
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Options

ARCH = "sm_90a"
COMMON = ("--world-size", "4", "--max-bytes", "8192")
LAYOUT = MailboxLayout(4, 8192)


def names(found):
    """The cache entries of (kernel, placeholders, key)."""
    return {jit.cache_names(kernel, *fake_args, key=key, arch=ARCH)[-1] for kernel, fake_args, key in found}


def entries(*arguments):
    """The cache entries that the command makes."""
    options = compile_command._parse(["--arch", ARCH, *arguments])
    return names((one.kernel, one.fake_args, one.key) for one in compile_command._wanted(options))


def loaded_names(kernels):
    return names((kernel, kernel.fake_args(), (kernel.config,)) for kernel in kernels)


@pytest.mark.parametrize("pdl", ["safe", "early"])
@pytest.mark.parametrize("transport", ["peer", "multicast"])
def test_collectives(monkeypatch, pdl, transport):
    options, multicast = Options(max_bytes=8192, pdl=pdl), transport == "multicast"
    asked = [*COMMON, "--pdl", pdl, "--transport", transport, "--dtype", "bf16", "fp32"]
    loaded = []
    monkeypatch.setattr(engine_module, "load", loaded.append)
    monkeypatch.setattr(engine_module.jit, "resident_ctas_per_sm", lambda kernel: 1 << 10)
    rank = SimpleNamespace(layout=LAYOUT, multicast=multicast, options=options, _checks=False, _delayed=False)
    for width in ACCESS_BYTES:
        engine_module.DeviceEngine._compile(rank, width)
    # Beside them the marker of reset(), where there is multicast.
    made = entries("--op", "all_gather", *asked)
    assert loaded_names(loaded) < made if multicast else loaded_names(loaded) == made
    assert len(made - loaded_names(loaded)) == multicast

    for op in ("all_reduce", "reduce_scatter"):
        loaded.clear()
        monkeypatch.setattr(all_reduce, "load", loaded.append)
        reductions = all_reduce.Reductions(LAYOUT, options, places=lambda _: 1, multicast=multicast, launcher=None)
        for dtype in (torch.bfloat16, torch.float32):
            reductions.prepare(op, dtype)
        assert loaded_names(loaded) == entries("--op", op, *asked)


@pytest.mark.parametrize("pdl", ["safe", "early"])
@pytest.mark.parametrize("transport", ["peer", "multicast"])
@pytest.mark.parametrize(("top_k", "parts"), [(0, ()), (6, ()), (2, ("publish", "collect"))])
def test_a_boundary(monkeypatch, pdl, transport, top_k, parts):
    loaded = []
    monkeypatch.setattr(all_reduce_mhc_launch, "load", loaded.append)
    built = parts or (("fused", "finalize") if top_k else ("fused",))
    all_reduce_mhc_launch.MhcLauncher(
        MhcShape(4096, 3, top_k), built, LAYOUT, Options(max_bytes=8192, pdl=pdl), None,
        places=lambda ctas_per_sm: 128, alone=True, multicast=transport == "multicast", launcher=None,
    )  # fmt: skip
    asked = [*COMMON, "--op", "all_reduce_mhc", "--hidden", "4096", "--num-streams", "3", "--moe-top-k", str(top_k)]
    asked += ["--transport", transport, "--pdl", pdl, *(["--part", *parts] if parts else [])]
    assert loaded_names(loaded) == entries(*asked)
    whole = 4 if pdl == "early" else 2  # each protocol, and with an early trigger each as a plain launch too
    assert len(loaded) == sum(whole if part in ("fused", "finalize") else 1 for part in built)
    for other in (("--num-streams", "4"), ("--hidden", "64"), ("--pdl", "off"), ("--max-bytes", "4096")):
        assert not loaded_names(loaded) & entries(*[*asked, *other]) - entries(*asked)


@pytest.fixture
def compiled(monkeypatch):
    """What is handed to the compiler, which does nothing."""
    found = []

    def compile_kernel(kernel, *fake_args, key):
        found.append((kernel, fake_args, key))

    monkeypatch.setattr(jit, "compile_kernel", compile_kernel)
    monkeypatch.setattr(topk, "_KERNELS", {})
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    return found


@pytest.mark.parametrize("columns", [1000, 65_536, 524_288, 1_048_576])
@pytest.mark.parametrize("mode", ["columns", "deterministic", "blocks"])
def test_topk(compiled, columns, mode):
    blocks = mode == "blocks"
    for rows, num_sms in itertools.product((1, 6, 24, 64, 192), (20, 114, 132, 148, 160)):
        kind = {"mode": "blocks"} if blocks else {"deterministic": mode == "deterministic"}
        topk.compiled(choose_config(rows, columns, 2048 if blocks else 1024, num_sms=num_sms, **kind))
    asked = ["--columns", str(columns), "--op", "topk_blocks" if blocks else "topk", "--k", "1024"]
    made = entries(*asked, *(["--deterministic"] if mode == "deterministic" else []))
    assert names(compiled) <= made
    assert len(names(compiled)) > 2
    # Less is made for fewer rows, and it is the same.
    assert entries(*asked, "--max-rows", "1") < entries(*asked)
    if mode == "deterministic":
        assert not names(compiled) & entries(*asked)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("sink", [None, torch.zeros(16)])
def test_sparse_mla(compiled, layout, heads, sink):
    kv = torch.zeros(2, 16, layout.record_bytes, dtype=torch.uint8)
    records = record_view(kv, 16, layout)
    for tokens, width in itertools.product((1, 48), (128, 200, 640)):
        q = torch.zeros(tokens, heads, 512, dtype=torch.bfloat16)
        window = ColumnSet(records, torch.zeros(tokens, width, dtype=torch.int32))
        config, _ = sparse_mla_launch.configure(q, window, None, sink, 132)
        sparse_mla_launch.compiled.__wrapped__(config)
    made = entries("--op", "sparse_mla", "--kv-layout", layout.name, "--heads", str(heads))
    assert names(compiled) <= made
    assert len(names(compiled)) == (3 if layout.name == "scaled_fp8" else 4)
    other = entries("--op", "sparse_mla", "--kv-layout", layout.name, "--heads", "16" if heads == 8 else "8")
    assert not names(compiled) & other


def test_an_fp8_query_is_another_kernel():
    asked = ("--op", "sparse_mla", "--kv-layout", "plain_fp8")
    assert not entries(*asked) & entries(*asked, "--query", "fp8")


def test_the_command_knows_every_layout():
    assert [layout.name for layout in LAYOUTS] == list(compile_command.KV_LAYOUTS)
