# SPDX-License-Identifier: Apache-2.0
"""The fused kernels compile for every architecture, keep the rules of docs/mailbox.md, and round where they have to."""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter

import pytest

pytest.importorskip("cutlass")

from nvcomm import UsageError
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig, MhcShape
from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
from nvcomm.compile import ARCHES, Variant
from nvcomm.cubin import disassemble, find_nvdisasm
from nvcomm.mailbox import MAX_WORLD_SIZE, MailboxLayout
from tests.unit import compile_checks as checks
from tests.unit.ptx_model import Kernel, parse
from tests.unit.test_compile_check_collectives import compiled, on_architectures

PARTS = (
    ("fused", False),
    ("fused", True),
    ("finalize", False),
    ("finalize", True),
    ("publish", False),
    ("collect", False),
)
SHAPE = MhcShape(5120, 4, 6)


def variant(part="fused", two_shot=False, world_size=4, multicast=False, pdl="safe", shape=SHAPE) -> Variant:
    config = MhcConfig(MailboxLayout(world_size, 4 << 20), shape, part, two_shot, multicast, pdl)
    protocol = "two-shot" if two_shot else "LL"
    name = f"{part} {protocol} {world_size} ranks, {shape.hidden}, multicast {multicast}, {pdl}"
    return Variant.of(name, AllReduceMhcKernel(config))


def every_variant():
    for (part, two_shot), world_size in itertools.product(PARTS, range(1, MAX_WORLD_SIZE + 1)):
        yield variant(part, two_shot, world_size)
    for (part, two_shot), pdl, multicast in itertools.product(PARTS, ("off", "early"), (False, True)):
        yield variant(part, two_shot, pdl=pdl, multicast=multicast and part != "collect")
    for hidden, streams in itertools.product((64, 1024, 4096, 7168, 16384), (1, 3, 4)):
        yield variant(shape=MhcShape(hidden, streams))


def check(one: Variant, arch: str, *, sass: bool) -> None:
    made = compiled(one, arch)
    assert f".target {arch}" in made.ptx
    (kernel,) = parse(made.ptx)
    config: MhcConfig = one.key[0]
    roles = checks.parameter_roles(one.kernel, one.fake_args)
    publishes, collects = config.part != "collect", config.part != "publish"
    checks.check_multicast(kernel, roles, used=config.multicast and publishes)
    if collects:
        checks.check_mailbox(kernel, roles, stores=True)
    checks.check_no_escape(kernel, roles)
    checks.check_no_nc(kernel, roles)
    if publishes:
        checks.check_wait_first(kernel, roles, pdl=config.pdl != "off")
    else:
        check_wait_before_stores(kernel, roles, pdl=config.pdl != "off")
    if collects and config.pdl != "early":  # a publish kernel stores nothing that the collect kernel does not wait for
        checks.check_release_before_trigger(kernel)
    checks.check_no_trap(kernel)
    for name, usage in made.usage.items():
        assert usage.frame_bytes == 0, f"{name} spills {usage.frame_bytes} bytes"
    if sass and find_nvdisasm() is not None:
        checks.check_no_local_memory(disassemble(made.cubin))


def waited_before(kernel: Kernel) -> list[bool]:
    """For each instruction, whether the wait runs before it on every path."""
    waits = [one.opcode == checks.WAIT and not one.predicate for one in kernel.body]
    return kernel.flow(False, True, lambda index, before: before or waits[index], operator.and_)


def check_wait_before_stores(kernel: Kernel, roles: checks.Roles, *, pdl: bool) -> None:
    """R1 (i) of a collect kernel: it may read ahead of its wait, and clears only behind it."""
    if not pdl:
        return
    waited = waited_before(kernel)
    clears = [i for i, one, origins in kernel.accesses(roles) if one.opcode == "st.relaxed.sys.global.v4.b32"]
    assert clears, "no clears"
    for index in clears:
        assert waited[index], f"`{kernel.body[index]}` can run before {checks.WAIT}"


@pytest.mark.parametrize(("part", "two_shot"), PARTS)
def test_compile_check_each_part(part, two_shot):
    check(variant(part, two_shot), "sm_90a", sass=True)


@pytest.mark.parametrize("arch", ARCHES[1:])
def test_compile_check_other_architectures(arch):
    check(variant(), arch, sass=False)


@pytest.mark.compile_all
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("one", "arch"), on_architectures(every_variant()))
def test_compile_check_every_variant(one, arch):
    check(one, arch, sass=False)


def test_R1_compile_check_the_gamma_alone_is_read_before_the_wait():
    one = variant()
    (kernel,) = parse(compiled(one, "sm_90a").ptx)
    waited = waited_before(kernel)
    early = [
        one for index, one in enumerate(kernel.body) if one.is_memory and "global" in one.opcode and not waited[index]
    ]
    assert [one.opcode for one in early] == ["ld.global.v4.b32"]


def test_R13_compile_check_counts_every_rounding():
    """Per chunk of 8 values and 4 streams: 3 additions of the tree, 4 products and 16 fma of the post-mix, 1 product
    and 3 fma of the collapse; then what RMSNorm takes, which is one ULP apart from its reference anyway.
    """
    (kernel,) = parse(compiled(variant(), "sm_90a").ptx)
    found = Counter(one.opcode for one in kernel.body if re.match(r"(add|mul|fma)\.\S*f32", one.opcode))
    squares, scales, sums = 8, 16, 5 + 19 + 2
    assert found == {
        "add.rn.f32": 3 * 8 + sums - 1,
        "mul.rn.f32": (4 + 1) * 8 + 1 + scales + 1,
        "fma.rn.f32": (16 + 3) * 8 + squares - 1,
    }
    assert ".ftz" not in compiled(variant(), "sm_90a").ptx


@pytest.mark.parametrize(
    ("hidden", "cluster", "threads"),
    [(64, 1, 32), (1024, 1, 128), (4096, 4, 128), (5120, 5, 128), (7168, 7, 128), (8192, 8, 128), (16384, 8, 256)],
)
def test_a_row_is_the_work_of_a_cluster(hidden, cluster, threads):
    config = MhcConfig(MailboxLayout(4, 4 << 20), MhcShape(hidden))
    assert (config.cluster, config.threads) == (cluster, threads)
    assert config.cluster * config.threads >= config.shape.chunks


@pytest.mark.parametrize(
    "wrong", [{"hidden": 100}, {"hidden": 0}, {"num_streams": 5}, {"num_streams": 0}, {"top_k": 17}]
)
def test_shapes_that_no_kernel_takes_are_refused(wrong):
    with pytest.raises(UsageError, match="wanted"):
        MhcShape(**{"hidden": 5120, **wrong})
