# SPDX-License-Identifier: Apache-2.0
"""Every collective compiles for every architecture, and its PTX and SASS are what docs/mailbox.md asks for.

`make test` takes one variant of each kernel and transport; `--compile-all` takes all.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass")

from nvcomm import jit
from nvcomm.collectives.tensors import ACCESS_BYTES
from nvcomm.compile import ARCHES, Variant, reset_variants, variants
from nvcomm.cubin import disassemble, find_nvdisasm
from nvcomm.mailbox import MAX_WORLD_SIZE
from tests.unit import compile_checks as checks
from tests.unit.ptx_model import Kernel, parse

MAX_BYTES = 4 << 20
TRANSPORTS = ("peer", "multicast")


def one_of_each():
    """One variant of each kernel and transport, four ranks and the widest accesses."""
    seen = set()
    for variant in variants([4], MAX_BYTES, "safe", TRANSPORTS):
        kind = (type(variant.kernel), variant.key[0].multicast)
        if kind not in seen:
            seen.add(kind)
            yield variant


def every_variant():
    """Every number of ranks, transport and access width, and the other launch modes at the widest: width and mode
    are decided in different places of a kernel, so not all pairs of them.
    """
    world_sizes = range(1, MAX_WORLD_SIZE + 1)
    yield from variants(world_sizes, MAX_BYTES, "safe", TRANSPORTS)
    for pdl in ("off", "early"):
        for variant in variants(world_sizes, MAX_BYTES, pdl, TRANSPORTS):
            if variant.key[0].access_bytes == max(ACCESS_BYTES):
                yield variant


# Numbers of ranks that are compiled for every architecture, the others for Hopper alone: what differs between them is
# how far loops are unrolled.
RANKS_EVERYWHERE = (2, 4, 8)


def on_architectures(matrix, name=lambda variant: variant.name):
    """Parameters: each variant with the architectures that it is compiled for; an id for people by `name`."""
    for variant in matrix:
        everywhere = variant.key[0].layout.world_size in RANKS_EVERYWHERE
        for arch in ARCHES if everywhere else ("sm_90a",):
            yield pytest.param(variant, arch, id=f"{name(variant)}-{arch}")


_MADE: dict[tuple[object, ...], jit.Artifacts] = {}


def compiled(variant: Variant, arch: str) -> jit.Artifacts:
    """Compiles once per variant and architecture; the negative controls look at the same PTX again."""
    place = (type(variant.kernel), variant.key, arch)
    if place not in _MADE:
        _MADE[place] = jit.artifacts(variant.kernel, *variant.fake_args, arch=arch)
    return _MADE[place]


def check(variant: Variant, arch: str, *, sass: bool) -> Kernel:
    """Asserts everything about one variant; returns its PTX.

    Args:
        sass: also disassemble, which takes longer than all the rest and repeats what the cubin's tables say.
    """
    made = compiled(variant, arch)
    assert f".target {arch}" in made.ptx
    (kernel,) = parse(made.ptx)
    config = variant.key[0]
    roles = checks.parameter_roles(variant.kernel, variant.fake_args)
    checks.check_multicast(kernel, roles, used=config.multicast)
    checks.check_mailbox(kernel, roles, stores=not config.multicast)
    checks.check_no_escape(kernel, roles)
    checks.check_no_nc(kernel, roles)
    checks.check_wait_first(kernel, roles, pdl=config.pdl != "off")
    if config.pdl != "early":  # R1 (iii): there the caller promises that the next kernel waits
        checks.check_release_before_trigger(kernel)
    checks.check_no_trap(kernel)
    for name, usage in made.usage.items():
        assert usage.frame_bytes == 0, f"{name} spills {usage.frame_bytes} bytes"
    if sass and find_nvdisasm() is not None:
        checks.check_no_local_memory(disassemble(made.cubin))
    return kernel


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", list(one_of_each()), ids=lambda variant: variant.name)
def test_compile_check_each_kernel_and_transport(variant, arch):
    check(variant, arch, sass=True)


@pytest.mark.compile_all
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "arch"),
    on_architectures(every_variant(), lambda variant: f"{variant.name}, pdl {variant.key[0].pdl}"),
)
def test_compile_check_every_variant(variant, arch):
    check(variant, arch, sass=False)


@pytest.mark.parametrize("arch", ARCHES)
def test_compile_check_the_markers_of_reset(arch):
    """They travel as calls do: multimem on the multicast address, and nothing else is touched."""
    (variant,) = reset_variants([4], MAX_BYTES)
    made = compiled(variant, arch)
    (kernel,) = parse(made.ptx)
    roles = checks.parameter_roles(variant.kernel, variant.fake_args)
    checks.check_multicast(kernel, roles, used=True)
    checks.check_no_trap(kernel)
    assert {one.opcode.split(".")[0] for _, one, _ in kernel.accesses(roles)} == {"multimem"}
    assert all(usage.frame_bytes == 0 for usage in made.usage.values())


def test_compile_check_covers_both_transports_and_every_access_width():
    assert {variant.key[0].multicast for variant in one_of_each()} == {False, True}
    on_hopper = {one.values[0].name for one in on_architectures(every_variant()) if one.values[1] == "sm_90a"}
    assert on_hopper == {variant.name for variant in every_variant()}
    assert {one.values[1] for one in on_architectures(every_variant())} == set(ARCHES)
    widths = {variant.key[0].access_bytes for variant in every_variant()}
    assert widths == set(ACCESS_BYTES)


def test_compile_check_finds_a_multicast_kernel_that_claims_to_have_none():
    """Negative control on real PTX: the multicast kernel's roles with two parameters exchanged."""
    variant = next(v for v in one_of_each() if v.key[0].multicast)
    (kernel,) = parse(compiled(variant, "sm_90a").ptx)
    roles = checks.parameter_roles(variant.kernel, variant.fake_args)
    (multicast,) = (index for index, role in roles.items() if role == "multicast")
    peer = next(index for index, role in roles.items() if role == "mailbox")
    with pytest.raises(AssertionError, match="wanted none"):
        checks.check_multicast(kernel, roles, used=False)
    with pytest.raises(AssertionError, match="multicast"):
        checks.check_multicast(kernel, roles | {multicast: "mailbox", peer: "multicast"}, used=True)
    with pytest.raises(AssertionError, match="R4 wants"):
        checks.check_mailbox(kernel, roles | {multicast: "mailbox"}, stores=False)


def test_compile_check_finds_the_missing_fence_of_an_early_trigger():
    """Negative control on real PTX: what R1 (iii) allows is what R1 (ii) forbids."""
    variant = next(iter(variants([2], MAX_BYTES, "early", ["peer"])))
    (kernel,) = parse(compiled(variant, "sm_90a").ptx)
    with pytest.raises(AssertionError, match="can follow"):
        checks.check_release_before_trigger(kernel)


def test_compile_check_names_parameters_as_the_kernels_do():
    variant = next(one_of_each())
    (kernel,) = parse(compiled(variant, "sm_90a").ptx)
    roles = checks.parameter_roles(variant.kernel, variant.fake_args)
    assert sorted(roles.values()) == ["mailbox"] * 4 + ["multicast", "state"]
    assert max(roles) < len(kernel.parameters)
    assert set(itertools.pairwise([i for i, role in roles.items() if role == "mailbox"])) == {(3, 4), (4, 5), (5, 6)}
