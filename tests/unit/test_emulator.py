# SPDX-License-Identifier: Apache-2.0
"""The emulator on small programs: what it computes, what it lets happen late, and what it does not let pass."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.emulator import values  # noqa: E402
from tests.emulator.machine import Machine  # noqa: E402
from tests.emulator.memory import Memory  # noqa: E402
from tests.emulator.program import Launch, Program  # noqa: E402
from tests.emulator.ptx import parse  # noqa: E402

# %rd3 is the address of the thread's word of the one parameter, %rd1 that of the first word.
HEAD = """
.visible .entry k(.param .u64 k_param_0) {
    .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""
SHARED = "mov.b32 %r3, __dynamic_shmem__0; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4;"


def program(body: str) -> Program:
    return Program(HEAD + body + " ret; }")


def run(body: str, words, seed: int, *, threads: int = 32, ctas: int = 1, cluster: int = 1, shared_bytes: int = 256):
    """Runs a program on a copy of `words`; what it leaves there."""
    memory = Memory(seed)
    at = memory.allocate(np.asarray(words, np.uint32))
    launch = Launch(program(body), [at], (ctas, 1, 1), threads, cluster, shared_bytes)
    Machine(memory, seed).run([[launch]], limit=20_000)
    return np.frombuffer(memory.bytes_at(at, 4 * len(words)), np.uint32)


def as_f32(numbers) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_fma_rounds_once(seed):
    random = np.random.default_rng(seed)
    a, b = (as_f32(random.standard_normal(2000)) for _ in range(2))
    # The hard ones: the product is next to a tie of the sum's rounding.
    c = as_f32(np.where(random.random(2000) < 0.5, -a * b, np.exp2(24) * np.round(a * b * 64)))
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    seen = values.from_f32(values.fma(a, b, c)).view(np.float32)
    for want, got in zip(exact, seen.tolist(), strict=True):
        neighbours = [np.nextafter(np.float32(got), np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(want - Fraction(got)) <= abs(want - Fraction(float(one))) for one in neighbours)
    tie = [as_f32([one]) for one in (1 + 2**-12, 1 + 2**-12, 2**-60)]
    assert values.from_f32(values.fma(*tie)).view(np.float32)[0] == np.float32(1 + 2**-11 + 2**-23)


def test_numbers_are_rounded_as_torch_rounds_them(seed):
    random = np.random.default_rng(seed)
    x = (as_f32(random.standard_normal(4000)) * np.exp2(random.integers(-30, 30, 4000))).astype(np.float32)
    for dtype, down in ((torch.bfloat16, values.f32_to_bf16), (torch.float16, values.f32_to_f16)):
        with np.errstate(over="ignore"):
            seen = down(x)
        assert (seen == torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)).all()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(values.f16_to_f32(values.e4m3_as_f16()), codes, equal_nan=True)


def test_products_of_64_bits(seed):
    a, b = np.random.default_rng(seed).integers(-(2**63), 2**63, (2, 1000), np.int64)
    want = [(x * y >> 64) % 2**64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert values.high_half_64(a, b).tolist() == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("mul.hi.s32 %r3, %r0, 1431655766;", lambda x: x * 1431655766 >> 32),
        ("div.s32 %r3, %r0, 7;", lambda x: int(x / 7)),
        ("shr.s32 %r3, %r0, 40;", lambda x: x >> 31),
        ("shl.b32 %r3, %r0, 32;", lambda x: 0),
        ("min.relu.s32 %r3, %r0, 5;", lambda x: max(min(x, 5), 0)),
        ("prmt.b32 %r3, %r0, 0, 0x4210;", lambda x: x & 0xFFFFFF),
        ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %r0; mov.b32 %r3, {hi, lo}; }", lambda x: x << 16 | x >> 16 & 0xFFFF),
        ("setp.lt.s32 %p1, %r0, 0; selp.b32 %r3, 1, 2, %p1;", lambda x: 1 if x < 0 else 2),
        (
            "setp.lt.u32 %p1, %r0, 9; mov.b32 %r3, 3; @!%p1 bra $L; mov.b32 %r3, 4; $L:",
            lambda x: 4 if 0 <= x < 9 else 3,
        ),
        ("shfl.sync.bfly.b32 %r3, %r1, 3, 31, -1; sub.s32 %r3, %r3, %r1; add.s32 %r3, %r3, %r1;", None),
    ],
)
def test_instructions(body, want, seed):
    x = np.random.default_rng(seed).integers(-(2**31), 2**31, 32)
    x[:4] = (-1, 0, 3, 8)
    seen = run(f"ld.global.b32 %r0, [%rd3]; {body} st.global.b32 [%rd3], %r3;", x % 2**32, seed)
    wanted = [i ^ 3 for i in range(32)] if want is None else [want(int(one)) % 2**32 for one in x]
    assert seen.tolist() == wanted


def test_names_of_a_block_are_its_own():
    block = "{ .reg .pred p; WAIT: setp.eq.b32 p, %r1, 0; @p bra WAIT; }"
    (kernel,) = parse(HEAD + block + block + "ret; }")
    (first, _), (second, _) = ((one.operands[0], one.labels) for one in kernel.body if one.opcode == "setp.eq.b32")
    assert first != second
    targets = [one.operands[0] for one in kernel.body if one.opcode == "bra"]
    assert [one.labels for one in kernel.body if one.labels] == [[targets[0]], [targets[1]]]


def test_an_unknown_instruction_is_an_error():
    with pytest.raises(NotImplementedError, match="bfind"):
        program("bfind.u32 %r3, %r1;")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("ld.global.b32 %r3, [%rd3+128];", "load of 4 bytes at .* outside of every allocation"),
        ("ld.global.b32 %r3, [%rd3+2];", "load of 4 bytes at .* not aligned"),
        ("mov.b32 %r3, 2048; ld.shared.b32 %r4, [%r3];", "shared access to 4 bytes at byte 1024 of 256"),
        ("mapa.shared::cluster.u32 %r3, %r1, 2;", "a CTA that the cluster does not have"),
        ("bar.sync 0, 64;", r"wait for ever:\n.*waits at bar.sync"),
        ("setp.eq.b32 %p1, %r1, 0; @%p1 bra $L; bar.warp.sync -1; $L:", r"wait for ever:\n.*waits for its warp"),
        (
            "setp.eq.b32 %p1, %r1, 0; @%p1 bra $L; bar.warp.sync -1; ret; $L: bar.warp.sync -1;",
            "lanes of a warp meet in different instructions",
        ),
        ("$L: ld.relaxed.sys.global.b32 %r3, [%rd1]; setp.ne.b32 %p1, %r3, 1; @%p1 bra $L;", "no end"),
        (SHARED + "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r3], 4;", "was not initialised"),
    ],
)
def test_what_does_not_pass(body, complaint, seed):
    with pytest.raises(AssertionError, match=complaint):
        run(body, np.zeros(32), seed)


def test_a_store_to_what_is_read_only_does_not_pass(seed):
    memory = Memory(seed)
    at = memory.allocate(bytes(128), writable=False)
    with pytest.raises(AssertionError, match="read-only"):
        Machine(memory, seed).run([[Launch(program("st.global.b32 [%rd3], %r1;"), [at], (1, 1, 1), 32)]])


def test_a_copy_is_there_when_it_was_waited_for(seed):
    copy = SHARED + "cp.async.ca.shared.global [%r5], [%rd3], 4, 4; cp.async.commit_group; {} ld.shared.b32 %r6, [%r5];"
    body, words = copy + "st.global.b32 [%rd3], %r6;", np.arange(32)
    assert run(body.replace("{}", "cp.async.wait_group 0;"), words, seed).tolist() == words.tolist()
    for wait in ("", "cp.async.wait_group 1;"):
        assert (run(body.replace("{}", wait), words, seed) == 0xFFFFFFFF).all()


def test_shared_memory_of_a_cta_that_has_exited(seed):
    """CTA 1 writes into CTA 0, which waits for it or does not."""
    body = (
        SHARED + "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "
        "mapa.shared::cluster.u32 %r6, %r5, 0; setp.eq.b32 %p1, %r2, 0; @%p1 bra $END; "
        "mov.b32 %r7, 0; $L: add.s32 %r7, %r7, 1; setp.lt.s32 %p2, %r7, 300; @%p2 bra $L; "
        "st.shared::cluster.b32 [%r6], %r1; $END:"
    )
    together = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    run(body + together, np.zeros(32), seed, ctas=2, cluster=2)
    with pytest.raises(AssertionError, match="has exited"):
        run(body, np.zeros(32), seed, ctas=2, cluster=2)


def test_whoever_polls_lets_the_others_go_on(seed):
    """Lane 0 waits, at a smaller address, for what lane 1 stores."""
    body = (
        "setp.eq.b32 %p1, %r1, 0; @!%p1 bra $OTHER; $L: ld.relaxed.sys.global.b32 %r3, [%rd1]; "
        "setp.ne.b32 %p2, %r3, 7; @%p2 bra $L; ret; $OTHER: setp.eq.b32 %p3, %r1, 1; mov.b32 %r4, 7; "
        "@%p3 st.relaxed.sys.global.b32 [%rd1], %r4;"
    )
    assert run(body, np.zeros(32), seed)[0] == 7


@pytest.mark.parametrize("wait", ["griddepcontrol.wait;", ""])
def test_a_dependent_launch_begins_early_and_waits(wait, seed):
    """Where it does not wait, some of its threads come too early."""
    first = program("griddepcontrol.launch_dependents; mov.b32 %r3, 5; st.global.b32 [%rd3], %r3;")
    second = program(wait + "ld.global.b32 %r3, [%rd3]; add.s32 %r3, %r3, 1; st.global.b32 [%rd3], %r3;")
    seen = set()
    for more in range(20):
        memory = Memory(seed + more)
        at = memory.allocate(bytes(1024))
        Machine(memory, seed + more).run([[Launch(one, [at], (1, 1, 1), 256) for one in (first, second)]])
        seen |= set(np.frombuffer(memory.bytes_at(at, 1024), np.uint32).tolist())
    assert seen == {6} if wait else seen - {6}


def test_late_words_keep_their_order_at_one_address_only(seed):
    memory = Memory(seed)
    at = memory.allocate(bytes(800))
    memory.arrives_late(at, 800, prompt_word=9)
    addresses = at + 4 * np.arange(100)
    for word in (1, 2, 3):
        memory.store(addresses, np.full((100, 1), word, np.uint32))
    memory.write(at + 796, 4, 9)
    assert memory.read(at + 796, 4) == 9
    before, mixed = np.zeros(100, np.uint32), False
    while memory.num_flying:
        memory.land(0.2)
        words = np.frombuffer(memory.bytes_at(at, 400), np.uint32)
        assert (words >= before).all()
        mixed |= len(set(words.tolist())) > 2
        before = words
    assert (before == 3).all()
    assert mixed
