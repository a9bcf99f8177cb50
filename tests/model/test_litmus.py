# SPDX-License-Identifier: Apache-2.0
"""docs/litmus under the PTX memory model, and the model itself under tests whose verdicts are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.ptx_axioms import is_allowed, parse

FILES = sorted((Path(__file__).parents[2] / "docs" / "litmus").glob("*.litmus"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_verdict_is_what_the_file_says(path):
    test = parse(path.read_text())
    assert test.name == path.stem
    assert is_allowed(test) is test.allowed


def written(threads: list[tuple[str, list[str]]], condition: str, start: str = "x=0 y=0 z=0") -> str:
    """A test as text: threads are "cta gpu" and instructions."""
    deep = max(len(code) for _, code in threads)
    columns = [[f"P{i}@cta {at.split()[0]},gpu {at.split()[1]}", *code, *[""] * (deep - len(code))]
               for i, (at, code) in enumerate(threads)]  # fmt: skip
    body = "\n".join(" | ".join(row) + ";" for row in zip(*columns, strict=True))
    return "PTX t\n{\n" + ";\n".join(start.split()) + ";\n}\n" + body + f"\nexists\n({condition})"


def passing(store: str, load: str, at: str = "0 0", *, fence: str = "") -> str:
    """Message passing: x is stored before y, and read behind it."""
    fences = [f"fence.acq_rel.{fence}"] if fence else []
    return written(
        [
            ("0 0", ["st.relaxed.sys x, 1", *fences, f"st.{store} y, 1"]),
            (at, [f"ld.{load} r0, y", *fences, "ld.relaxed.sys r1, x"]),
        ],
        "P1:r0 == 1 /\\ P1:r1 == 0",
    )


# From the examples of the PTX ISA, section 8.10, and of "A Formal Analysis of the NVIDIA PTX Memory Consistency Model".
KNOWN = {
    "message passing, relaxed": (passing("relaxed.sys", "relaxed.sys", "0 1"), True),
    "message passing, release and acquire": (passing("release.sys", "acquire.sys", "0 1"), False),
    "message passing, release alone": (passing("release.sys", "relaxed.sys", "0 1"), True),
    "message passing, acquire alone": (passing("relaxed.sys", "acquire.sys", "0 1"), True),
    "message passing, gpu scope on one gpu": (passing("release.gpu", "acquire.gpu", "1 0"), False),
    "message passing, gpu scope on two": (passing("release.gpu", "acquire.gpu", "0 1"), True),
    "message passing, cta scope in two ctas": (passing("release.cta", "acquire.cta", "1 0"), True),
    "message passing, fences": (passing("relaxed.sys", "relaxed.sys", "0 1", fence="sys"), False),
    "message passing, narrow fences": (passing("relaxed.sys", "relaxed.sys", "0 1", fence="gpu"), True),
    "store buffering with acq_rel fences": (
        written(
            [
                ("0 0", ["st.relaxed.sys x, 1", "fence.acq_rel.sys", "ld.relaxed.sys r0, y"]),
                ("0 1", ["st.relaxed.sys y, 1", "fence.acq_rel.sys", "ld.relaxed.sys r0, x"]),
            ],
            "P0:r0 == 0 /\\ P1:r0 == 0",
        ),
        True,
    ),
    "load buffering without dependencies": (
        written(
            [
                ("0 0", ["ld.relaxed.sys r0, x", "st.relaxed.sys y, 1"]),
                ("0 1", ["ld.relaxed.sys r0, y", "st.relaxed.sys x, 1"]),
            ],
            "P0:r0 == 1 /\\ P1:r0 == 1",
        ),
        True,
    ),
    "two reads of one address": (
        written(
            [("0 0", ["st.relaxed.sys x, 1"]), ("0 1", ["ld.relaxed.sys r0, x", "ld.relaxed.sys r1, x"])],
            "P1:r0 == 1 /\\ P1:r1 == 0",
        ),
        False,
    ),
    "two stores of one thread": (written([("0 0", ["st.relaxed.sys x, 1", "st.relaxed.sys x, 2"])], "x == 1"), False),
    "a read, then a store that it cannot have seen": (
        written([("0 0", ["ld.relaxed.sys r0, x", "st.relaxed.sys x, 1"])], "P0:r0 == 1"), False,
    ),
    "write to read causality": (
        written(
            [
                ("0 0", ["st.relaxed.sys x, 1"]),
                ("0 1", ["ld.relaxed.sys r0, x", "fence.acq_rel.sys", "st.relaxed.sys y, 1"]),
                ("0 2", ["ld.relaxed.sys r0, y", "fence.acq_rel.sys", "ld.relaxed.sys r1, x"]),
            ],
            "P1:r0 == 1 /\\ P2:r0 == 1 /\\ P2:r1 == 0",
        ),
        False,
    ),
    "legs of different scope": (
        written(
            [
                ("0 0", ["st.relaxed.sys x, 1", "st.release.cta y, 1"]),
                ("0 0", ["ld.acquire.cta r0, y", "st.release.sys z, 1"]),
                ("0 1", ["ld.acquire.sys r0, z", "ld.relaxed.sys r1, x"]),
            ],
            "P1:r0 == 1 /\\ P2:r0 == 1 /\\ P2:r1 == 0",
        ),
        False,
    ),
    "legs of different scope, the far one too narrow": (
        written(
            [
                ("0 0", ["st.relaxed.sys x, 1", "st.release.cta y, 1"]),
                ("0 0", ["ld.acquire.cta r0, y", "st.release.gpu z, 1"]),
                ("0 1", ["ld.acquire.gpu r0, z", "ld.relaxed.sys r1, x"]),
            ],
            "P1:r0 == 1 /\\ P2:r0 == 1 /\\ P2:r1 == 0",
        ),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_model_gives_known_verdicts(name):
    text, allowed = KNOWN[name]
    assert is_allowed(parse(text)) is allowed


@pytest.mark.parametrize("code", ["atom.add.relaxed.sys r0, x", "fence.sc.sys", "st.weak.sys x, 1", "bar.sync 0"])
def test_what_is_not_modelled_is_refused(code):
    with pytest.raises(AssertionError, match="not one of the instructions"):
        parse(written([("0 0", [code])], "x == 0"))
