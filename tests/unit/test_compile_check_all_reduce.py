# SPDX-License-Identifier: Apache-2.0
"""The reducing kernels compile for every architecture, and keep the rules of docs/mailbox.md in PTX and SASS."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("cutlass")

from nvcomm.collectives.all_reduce_config import ReduceConfig
from nvcomm.collectives.all_reduce_ll import AllReduceLLKernel
from nvcomm.collectives.all_reduce_tree import ELEM_BYTES
from nvcomm.collectives.all_reduce_two_shot import AllReduceTwoShotKernel
from nvcomm.collectives.reduce_scatter import ReduceScatterKernel
from nvcomm.compile import ARCHES, Variant
from nvcomm.mailbox import CHUNK_WORDS, MAX_WORLD_SIZE, MailboxLayout
from tests.unit.ptx_model import Kernel, parse
from tests.unit.test_compile_check_collectives import check, compiled, on_architectures

KERNELS = (AllReduceLLKernel, AllReduceTwoShotKernel, ReduceScatterKernel)


def variant(kernel, world_size=4, dtype="bf16", width=16, multicast=False, pdl="safe", spin=True) -> Variant:
    config = ReduceConfig(MailboxLayout(world_size, 4 << 20), dtype, width, multicast, pdl, spin=spin)
    name = f"{kernel.__name__} {world_size} ranks, {dtype}, {width}-byte accesses, multicast {multicast}, {pdl}"
    return Variant.of(name, kernel(config))


def one_of_each():
    for kernel in KERNELS:
        yield variant(kernel)
        if kernel is not ReduceScatterKernel:
            yield variant(kernel, multicast=True)


def every_variant():
    """Width and launch mode are decided in different places of a kernel, so not all pairs of them."""
    dtypes_and_widths = [(dtype, width) for dtype, size in ELEM_BYTES.items() for width in (16, size)]
    for kernel, world_size in itertools.product(KERNELS, range(1, MAX_WORLD_SIZE + 1)):
        for dtype, width in dtypes_and_widths:
            yield variant(kernel, world_size, dtype, width)
        for pdl in ("off", "early"):
            yield variant(kernel, world_size, pdl=pdl)
        if kernel is not ReduceScatterKernel:
            yield variant(kernel, world_size, multicast=True)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("one", list(one_of_each()), ids=lambda one: one.name)
def test_compile_check_each_kernel_and_transport(one, arch):
    check(one, arch, sass=True)


@pytest.mark.compile_all
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("one", "arch"), on_architectures(every_variant()))
def test_compile_check_every_variant(one, arch):
    check(one, arch, sass=False)


def kernel_of(one: Variant) -> Kernel:
    (kernel,) = parse(compiled(one, "sm_90a").ptx)
    return kernel


def additions(kernel: Kernel) -> list[str]:
    return [one.opcode for one in kernel.body if re.match(r"(add|fma|mad)\.\S*f(32|64)", one.opcode)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_R13_compile_check_counts_every_addition_and_flushes_nothing(kernel, world_size):
    """A tree over W rows takes W - 1 additions for each of the chunk's values, all of them `add.rn.f32`."""
    found = additions(kernel_of(variant(kernel, world_size)))
    assert found == ["add.rn.f32"] * ((world_size - 1) * CHUNK_WORDS * 2)
    assert not re.search(r"\.ftz", compiled(variant(kernel, world_size), "sm_90a").ptx)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compile_check_what_benchmarks_call_copy_never_polls(kernel):
    """What polls looks at the clock now and then, and records what it saw: the only release in a kernel."""

    def count(spin, opcode):
        return sum(one.opcode.startswith(opcode) for one in kernel_of(variant(kernel, spin=spin)).body)

    assert count(spin=True, opcode="st.release") > 0
    assert count(spin=False, opcode="st.release") == 0
    assert count(spin=False, opcode="ld.relaxed.sys") > 0
