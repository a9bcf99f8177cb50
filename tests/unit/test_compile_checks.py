# SPDX-License-Identifier: Apache-2.0
"""The compile checks themselves: each must find its violation in hand-written PTX, and pass the kernel without it."""

from __future__ import annotations

import pytest

from tests.unit import compile_checks as checks
from tests.unit.ptx_model import parse

ROLES = {0: "mailbox", 1: "mailbox", 2: "multicast", 3: "state"}

GOOD = """
.version 8.6
.target sm_90a
.visible .entry gather(
    .param .u64 gather_param_0,  // a comment, with a comma
    .param .align 8 .b8 gather_param_1[8],
    .param .u64 gather_param_2,
    .param .u64 gather_param_3,
    .param .u64 gather_param_4
)
.reqntid 32, 1, 1
{
    .reg .pred %p<9>;
    .reg .b64 %rd<40>;
    ld.param.b64 %rd1, [gather_param_0];
    ld.param.b64 %rd2, [gather_param_1];
    ld.param.b64 %rd3, [gather_param_2];
    ld.param.b64 %rd4, [gather_param_3];
    ld.param.b64 %rd5, [gather_param_4];
    mov.u32 %r1, %tid.x;
    griddepcontrol.wait;
    ld.relaxed.gpu.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4];
    mul.wide.u32 %rd6, %r2, 4096;
    ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd5];
    add.s64 %rd7, %rd6, %rd3;
    multimem.st.relaxed.sys.global.v4.f32 [%rd7+16], {%r6, %r7, %r8, %r9};
    mad.lo.s64 %rd8, %rd6, 4, %rd2;
    st.relaxed.sys.global.v4.b32 [%rd8], {%r6, %r7, %r8, %r9};
    cvta.to.global.u64 %rd9, %rd1;
    mov.b64 %rd10, %rd9;
POLL:
    { .reg .pred p;
    ld.relaxed.sys.global.b32 %r10, [%rd10];
    setp.eq.b32 p, %r10, -327686;
    @p bra POLL; }
    st.relaxed.sys.global.b32 [%rd10], -327686;
    st.global.b32 [%rd5], %r10;
    fence.acq_rel.sys;
    bar.sync 0;
    setp.ne.b32 %p2, %r1, 0;
    @%p2 bra $DONE;
    st.relaxed.gpu.global.b32 [%rd4], %r3;
    fence.acq_rel.sys;
    griddepcontrol.launch_dependents;
$DONE:
    ret;
}
"""


def check_all(ptx: str) -> None:
    (kernel,) = parse(ptx)
    checks.check_multicast(kernel, ROLES, used=True)
    checks.check_mailbox(kernel, ROLES, stores=True)
    checks.check_no_escape(kernel, ROLES)
    checks.check_no_nc(kernel, ROLES)
    checks.check_wait_first(kernel, ROLES, pdl=True)
    checks.check_release_before_trigger(kernel)
    checks.check_no_trap(kernel)


def test_the_good_kernel_passes():
    check_all(GOOD)


def swap(old: str, new: str):
    def edit(ptx: str) -> str:
        assert ptx.count(old) == 1, f"{old!r} stands {ptx.count(old)} times in the good kernel"
        return ptx.replace(old, new)

    return edit


VIOLATIONS = {
    "plain store on multicast": (
        swap("multimem.st.relaxed.sys.global.v4.f32 [%rd7+16]", "st.relaxed.sys.global.v4.b32 [%rd7+16]"),
        "touches the multicast address",
    ),
    "multimem of another type": (
        swap("global.v4.f32 [%rd7+16]", "global.v4.bf16x2 [%rd7+16]"),
        "touches the multicast",
    ),
    "multimem weaker than relaxed": (swap("multimem.st.relaxed.sys", "multimem.st.weak"), "touches the multicast"),
    "multimem reduction": (swap("multimem.st.", "multimem.red."), "touches the multicast address"),
    "load from multicast": (
        swap("    ret;", "    ld.relaxed.sys.global.b32 %r20, [%rd7];\n    ret;"),
        "touches the multicast address",
    ),
    "multimem on a unicast pointer": (
        swap("multimem.st.relaxed.sys.global.v4.f32 [%rd7+16]", "multimem.st.relaxed.sys.global.v4.f32 [%rd8]"),
        "does not come from",
    ),
    "no multicast store left": (
        swap("multimem.st.relaxed.sys.global.v4.f32 [%rd7+16], {%r6, %r7, %r8, %r9};", ""),
        "0 multicast stores",
    ),
    "multicast and mailbox mixed": (swap("add.s64 %rd7, %rd6, %rd3;", "selp.b64 %rd7, %rd1, %rd3, %p1;"), "mixes"),
    "multicast address stored": (
        swap("st.global.b32 [%rd5], %r10;", "st.global.b64 [%rd5], %rd7;"),
        "stores an address",
    ),
    "weak mailbox load": (swap("ld.relaxed.sys.global.b32 %r10", "ld.global.b32 %r10"), "R4 wants"),
    "mailbox load of gpu scope": (swap("ld.relaxed.sys.global.b32 %r10", "ld.relaxed.gpu.global.b32 %r10"), "R4 wants"),
    "non-coherent mailbox load": (swap("ld.relaxed.sys.global.b32 %r10", "ld.global.nc.b32 %r10"), "R4 wants"),
    "volatile mailbox load": (swap("ld.relaxed.sys.global.b32 %r10", "ld.volatile.global.b32 %r10"), "R4 wants"),
    "64-bit mailbox load": (swap("ld.relaxed.sys.global.b32 %r10", "ld.relaxed.sys.global.b64 %rd20"), "R4 wants"),
    "weak mailbox store": (swap("st.relaxed.sys.global.v4.b32 [%rd8]", "st.global.v4.b32 [%rd8]"), "R4 wants"),
    "atomic on a mailbox": (
        swap("st.relaxed.sys.global.b32 [%rd10], -327686;", "red.add.relaxed.sys.global.u32 [%rd10], 1;"),
        "R4 wants",
    ),
    "no mailbox stores": (
        lambda ptx: swap("st.relaxed.sys.global.b32 [%rd10], -327686;", "")(
            swap("st.relaxed.sys.global.v4.b32 [%rd8], {%r6, %r7, %r8, %r9};", "")(ptx)
        ),
        "no mailbox stores",
    ),
    "prefetch of a mailbox": (swap("    bar.sync 0;", "    prefetch.global.L2 [%rd10];"), "R4 wants"),
    "non-coherent state load": (
        swap(
            "ld.relaxed.gpu.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4]",
            "ld.global.nc.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4]",
        ),
        "without coherence",
    ),
    "no wait": (swap("    griddepcontrol.wait;", ""), "lacks griddepcontrol.wait"),
    "wait after the state was read": (
        lambda ptx: swap("mul.wide.u32 %rd6", "griddepcontrol.wait;\n    mul.wide.u32 %rd6")(
            swap("    griddepcontrol.wait;\n", "")(ptx)
        ),
        "can run before griddepcontrol.wait",
    ),
    "wait on one path alone": (
        swap("    griddepcontrol.wait;", "    @%p1 bra SKIP;\n    griddepcontrol.wait;\nSKIP:"),
        "can run before griddepcontrol.wait",
    ),
    "predicated wait": (swap("    griddepcontrol.wait;", "    @%p1 griddepcontrol.wait;"), "can run before"),
    "trigger before the wait": (
        swap("    griddepcontrol.wait;", "    griddepcontrol.launch_dependents;\n    griddepcontrol.wait;"),
        "launch_dependents can run before",
    ),
    "no fence before the trigger": (
        swap("[%rd4], %r3;\n    fence.acq_rel.sys;", "[%rd4], %r3;"),
        "no fence between",
    ),
    "fence of the CTA alone": (
        swap("[%rd4], %r3;\n    fence.acq_rel.sys;", "[%rd4], %r3;\n    fence.acq_rel.cta;"),
        "no fence between",
    ),
    "predicated fence": (
        swap("[%rd4], %r3;\n    fence.acq_rel.sys;", "[%rd4], %r3;\n    @%p2 fence.acq_rel.sys;"),
        "no fence between",
    ),
    "store after the trigger": (
        swap("launch_dependents;\n", "launch_dependents;\n    st.global.b32 [%rd5], %r1;\n    fence.acq_rel.sys;\n"),
        "can follow griddepcontrol.launch_dependents",
    ),
    "trap": (swap("    @%p2 bra $DONE;", "    @%p2 bra $DONE;\n    @%p3 trap;"), "traps"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_found(name):
    edit, says = VIOLATIONS[name]
    with pytest.raises(AssertionError) as caught:
        check_all(edit(GOOD))
    assert says in str(caught.value)


def one_fence_for_the_cta(ptx: str) -> str:
    """The good kernel with its other way to release: a barrier, and then one thread's fence for all."""
    return swap("    fence.acq_rel.sys;\n    bar.sync 0;", "    bar.sync 0;")(ptx)


def test_one_thread_may_fence_for_its_cta_behind_a_barrier():
    check_all(one_fence_for_the_cta(GOOD))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    fence.acq_rel.sys;\n", ""),
        ("    bar.sync 0;\n", ""),
        ("    bar.sync 0;\n", "    bar.warp.sync 0xffffffff;\n"),
        ("    bar.sync 0;\n", "    @%p2 bar.sync 0;\n"),
        ("    bar.sync 0;\n", "    bar.sync 0;\n    st.global.b32 [%rd5], %r1;\n"),
        ("    fence.acq_rel.sys;\n", "    bar.sync 0;\n"),
    ],
    ids=["no fence", "no barrier", "a warp's barrier", "a barrier for some", "a store behind it", "barriers alone"],
)
def test_what_one_threads_fence_does_not_cover_is_found(old, new):
    ptx = swap(old, new)(one_fence_for_the_cta(GOOD))
    with pytest.raises(AssertionError, match="no fence between"):
        check_all(ptx)


def test_a_store_in_a_loop_reaches_a_trigger_at_its_head():
    looping = swap(
        "    griddepcontrol.launch_dependents;\n", "AGAIN:\n    griddepcontrol.launch_dependents;\n    @%p2 bra POLL;\n"
    )
    with pytest.raises(AssertionError, match="can follow griddepcontrol.launch_dependents"):
        check_all(looping(GOOD))


def test_a_kernel_without_programmatic_launch_has_neither_wait_nor_trigger():
    plain = swap("    griddepcontrol.wait;\n", "")(GOOD)
    (kernel,) = parse(plain)
    with pytest.raises(AssertionError, match="without programmatic launch"):
        checks.check_wait_first(kernel, ROLES, pdl=False)
    (kernel,) = parse(swap("    griddepcontrol.launch_dependents;\n", "")(plain))
    checks.check_wait_first(kernel, ROLES, pdl=False)


def test_origins_go_through_every_step_of_an_address():
    (kernel,) = parse(GOOD)
    origins = kernel.origins(ROLES)
    assert origins["%rd7"] == {"multicast"}
    assert origins["%rd8"] == origins["%rd10"] == {"mailbox"}
    assert origins.get("%rd6", frozenset()) == frozenset(), "what was loaded has no origin"
    assert kernel.parameters == [f"gather_param_{i}" for i in range(5)]


def test_what_cannot_be_followed_is_an_error_and_not_a_pass():
    (kernel,) = parse(swap("    bar.sync 0;", "    call.uni somewhere, (%rd3);")(GOOD))
    with pytest.raises(NotImplementedError):
        checks.check_wait_first(kernel, ROLES, pdl=True)


@pytest.mark.parametrize("line", ["/*0040*/ LDL.64 R2, [R1+0x8] ;", "/*0040*/ @P0 STL [R1], R4 ;"])
def test_local_memory_in_sass_is_found(line):
    good = "/*0000*/ LDC R1, c[0x0][0x28] ;\n/*0010*/ LDG.E R2, [R4] ;\n/*0020*/ EXIT ;"
    checks.check_no_local_memory(good)
    with pytest.raises(AssertionError, match="local memory"):
        checks.check_no_local_memory(f"{good}\n{line}")
    with pytest.raises(AssertionError, match="not SASS"):
        checks.check_no_local_memory("")
