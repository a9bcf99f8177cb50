# SPDX-License-Identifier: Apache-2.0
"""Mutation runs: a small deliberate break of the real code, and the named test that has to fail on it.

A mutant is a change of text. The package is copied, the text replaced, and the copy imported afresh in this process in
place of the real one, test modules included; then pytest runs the test inside. Nothing of the library knows of it. A
text that is no longer there, or is there twice, is an error: a mutant cannot rot.

    python -m tests.mutation --world host [--markdown]      # a table: rule, break, test, how it failed

Worlds: "host"; "virtual", the GPU's tests; "emulated", the same breaks of the GPU code, with kernels run on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("nvcomm", "decode", "stress", "tests")
# What a test may fail with. Anything else (a name that does not exist, a kernel that does not compile) is a broken
# mutant, not a caught one.
CATCHES = ("AssertionError", "Failed", "PeerTimeoutError", "CollectiveMismatchError", "NvcommError")
UNLOADED_PLUGINS = ("cacheprovider", "faulthandler", "terminal", "timeout", "xdist")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of text.

    Attributes:
        path: of the file, from the root.
        old: text that occurs `count` times in it.
        new: what stands there instead.
        count: occurrences, all of them replaced.
    """

    path: str
    old: str
    new: str
    count: int = 1

    def apply(self, folder: Path) -> None:
        """Changes the file below `folder`."""
        file = folder / self.path
        text = file.read_text()
        seen = text.count(self.old)
        if seen != self.count:
            raise LookupError(f"{self.path} holds {seen} times, not {self.count} times, the text:\n{self.old}")
        file.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One break.

    Attributes:
        rule: of docs/mailbox.md.
        name: the break in a few words; unique.
        edits: what is changed.
        test: pytest's name of the test that catches it.
        on_cpu: of the test that catches it without a GPU, where the kernel's PTX is run on the CPU; "": none does.
        widths: access widths that the test needs, in bytes: other variants of the gather are not compiled.
    """

    rule: str
    name: str
    edits: tuple[Edit, ...]
    test: str
    widths: tuple[int, ...] = (16,)
    on_cpu: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a test on a mutant.

    Attributes:
        passed: the test noticed nothing.
        how: the first line of what it failed with.
        kind: the type of it.
        seconds: of the test.
    """

    passed: bool
    how: str
    kind: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the test failed, and on what a broken rule leads to."""
        return not self.passed and self.kind in CATCHES


class _Collector:
    """A pytest plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.ran = 0
        self.failure: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call" and report.outcome != "skipped"

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        if self.failure is None and call.excinfo is not None:
            lines = (
                str(call.excinfo.value).strip().splitlines() or str(call.excinfo.traceback[-1].statement).splitlines()
            )
            self.failure = (call.excinfo.typename, lines[0].strip())


@contextlib.contextmanager
def imported_afresh(edits: Sequence[Edit], widths: tuple[int, ...]) -> Iterator[None]:
    """Inside the block `import nvcomm` finds a changed copy; afterwards the real one is back."""

    def ours(name: str) -> bool:
        return name.partition(".")[0] in PACKAGES and name != __name__

    with tempfile.TemporaryDirectory(prefix="nvcomm-mutant-") as folder:
        shutil.copytree(ROOT / "nvcomm", Path(folder) / "nvcomm", ignore=shutil.ignore_patterns("__pycache__"))
        for edit in edits:
            edit.apply(Path(folder))
        kept = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
        sys.path.insert(0, folder)
        try:
            importlib.import_module("nvcomm")
            _compile_only(widths)
            yield
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if ours(name)]:
                del sys.modules[name]
            sys.modules.update(kept)


def _compile_only(widths: tuple[int, ...]) -> None:
    """Compiling is most of a mutant's time on a GPU."""
    import torch

    if torch.cuda.is_available():
        importlib.import_module("nvcomm.collectives.engine").ACCESS_BYTES = widths  # type: ignore[attr-defined]


def run(test: str, edits: Sequence[Edit] = (), widths: tuple[int, ...] = (16,)) -> Result:
    """Runs one test on the code with `edits` applied.

    Raises:
        LookupError: an edit's text is not there, or no such test ran.
    """
    collector = _Collector()
    off = [word for plugin in UNLOADED_PLUGINS for word in ("-p", f"no:{plugin}")]
    # The project's own options are for people: they want the plugin that writes the summary.
    options = [*off, "-o", "addopts=", "--import-mode=importlib", "--rootdir", str(ROOT), "-x"]
    started = time.monotonic()
    # One seed: whether a mutant is caught must not be a matter of chance.
    with imported_afresh(edits, widths), mock.patch.dict(os.environ, PYTEST_SEED="1"):
        code = pytest.main([*options, str(ROOT / test)], plugins=[collector])
    seconds = time.monotonic() - started
    if collector.failure is None and (code != pytest.ExitCode.OK or not collector.ran):
        raise LookupError(f"{test} did not run: pytest ended with {code!r}")
    kind, how = collector.failure or ("", "")
    return Result(collector.failure is None, how, kind, seconds)


def run_mutant(mutant: Mutant) -> Result:
    """The named test, on the mutant."""
    return run(mutant.test, mutant.edits, mutant.widths)


def rows(mutants: Sequence[Mutant], results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The table's cells."""
    cells = []
    for mutant, result in zip(mutants, results, strict=True):
        how = f"{result.kind}: {result.how}" if not result.passed else "NOT caught"
        short = how if len(how) <= 120 else how[:117] + "..."
        cells.append((mutant.rule, mutant.name, mutant.test, short, f"{result.seconds:.1f}"))
    return cells


HEAD = ("rule", "break", "caught by", "how it failed", "s")


def markdown(cells: Sequence[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> str:
    """A table."""
    lines = [head, ("---",) * len(head), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all mutants of a world; 0 if each was caught and each test passes on the code as it is."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=("host", "virtual", "emulated"), default="host")
    parser.add_argument("--only", default="", help="mutants with this text in rule or name")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth mutant, from the Ith on")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/reliability.md")
    given = parser.parse_args(argv)
    home = "tests.host.mutants" if given.world == "host" else "tests.kernel.mutants"
    mutants = [m for m in importlib.import_module(home).MUTANTS if given.only in f"{m.rule} {m.name}"]
    if given.world == "emulated":
        mutants = [replace(m, test=m.on_cpu) for m in mutants if m.on_cpu]
    if not mutants:
        parser.error(f"--only {given.only!r}: no mutant of this world has this in its rule or name")
    part, parts = map(int, given.part.split("/"))
    mutants = mutants[part::parts]
    good = True
    for test, widths in dict.fromkeys((m.test, m.widths) for m in mutants):
        result = run(test, (), widths)
        good &= result.passed
        sys.stderr.write(f"{'passes' if result.passed else 'FAILS ' + result.how}  {test}  {result.seconds:.1f} s\n")
    results = []
    for mutant in mutants:
        results.append(run_mutant(mutant))
        good &= results[-1].caught
        sys.stderr.write(f"{mutant.rule} {mutant.name}: {results[-1]}\n")
    if given.markdown:
        sys.stdout.write(markdown(rows(mutants, results)) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
