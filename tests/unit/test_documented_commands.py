# SPDX-License-Identifier: Apache-2.0
"""Every command that the documents show is one that could be typed: its program, files, options and targets exist.

Nothing is run: command lines are parsed by the parsers of the programs themselves.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
STARTS = ("nvcomm", "python", "python3", "torchrun", "mpiexec", "mpirun", "make", "pytest", "pip")
# What readers fill in.
PLACEHOLDERS = {"program.py"}


class ParsedError(BaseException):
    """Raised in place of what a program does once its arguments are read."""


class NotACommandError(Exception):
    """Why a command could not be typed."""


def commands_in(path):
    """Command lines of a document: of fenced blocks without a language, and of inline code; of a script's docstring."""
    text = path.read_text()
    if path.suffix == ".py":
        lines = text.partition('"""\n\n')[0].splitlines()
    else:
        blocks, outside, fence = [], [], None
        for line in text.splitlines():
            if line.startswith("```"):
                fence = line if fence is None else None
                blocks.append("")
            elif fence is None:
                outside.append(line)
            elif fence == "```":
                blocks[-1] += f"{line}\n"
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(outside))]
    for line in lines:
        yield from re.split(r"\s&&\s", line.strip().removeprefix("$ "))


def words_of(line):
    """The words of a command, without variables before it and without comments and notes behind it; () for prose."""
    line = re.sub(r"\s{2,}(\(|with|without).*", "", line)
    line = re.sub(r"\s\[(--[^\]]*)\]", r" \1", line.replace(" [MODEL]", ""))  # what may be left out
    line = re.sub(r"\b(\w+)(\|\w+)+", r"\1", line)  # the first of several choices
    try:
        words = shlex.split(line.partition(" > ")[0], comments=True)
    except ValueError:
        return ()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    is_command = len(words) > 1 and words[0] in STARTS and not re.search(r"\w[.,:]$", words[-1])
    return tuple(words) if is_command else ()


def check(words):
    """Raises NotACommandError unless `words` could be typed."""
    program, *rest = words
    if "..." in rest:  # shortened, by an option's values or by more of them
        dots = rest.index("...")
        del rest[dots - rest[dots - 1].startswith("-") : dots + 1]
    if program == "make":
        make(rest)
    elif program == "pip":
        pip(rest)
    elif program == "pytest":
        selection(rest)
    elif program == "nvcomm":
        module("nvcomm", rest)
    elif program == "torchrun":
        launched = torchrun(rest)
        if launched.module:
            module(launched.training_script, launched.training_script_args)
        else:
            script(launched.training_script)
    elif program in ("mpiexec", "mpirun"):
        launcher = re.match(r"((-n \d+|-l|--tag-output|--oversubscribe) ?)*", " ".join(rest))[0].split()
        if rest[len(launcher) :]:
            check(rest[len(launcher) :])
    elif rest[0] == "-m":
        module(rest[1], rest[2:])
    else:
        script(rest[0])


def torchrun(words):
    from torch.distributed.run import get_args_parser

    return parsed(lambda: get_args_parser().parse_args(words))


def parsed(parse):
    """What `parse()` returns; argparse's way of refusing becomes NotACommandError."""
    try:
        return parse()
    except SystemExit as error:
        raise NotACommandError(f"its parser ended with {error.code}") from error


def module(name, words):
    """`python -m name words`: the program is imported, and its own parser reads the words."""
    if name == "pytest":
        return selection(words)
    if name in ("venv", "mpi4py"):
        return None
    if name == "nvcomm":
        command, words = (words or ["list"])[0], words[1:]
        from nvcomm.__main__ import COMMANDS

        if command == "list":
            return None
        if command not in COMMANDS:
            raise NotACommandError(f"nvcomm has no command {command}")
        if not words:  # a command's name alone, in a sentence
            return None
        name = COMMANDS[command][0]
        if command == "bench":
            from nvcomm.bench.plan import parse

            return parsed(lambda: parse(words))
        if command == "compile":
            from nvcomm.compile import _parse

            return parsed(lambda: _parse(words))
    try:
        package = importlib.import_module(name)
        program = importlib.import_module(f"{name}.__main__") if hasattr(package, "__path__") else package
    except ImportError as error:
        if error.name in (name, f"{name}.__main__") or name.startswith(error.name or " "):
            raise NotACommandError(f"there is no module {name}") from error
        pytest.skip(f"{name} cannot be imported here: {error}")
    return main_of(program, words)


def main_of(program, words):
    """Runs `main` up to where its arguments are parsed."""

    def parse_args(self, args=None, namespace=None):
        argparse_parse_args(self, args, namespace)
        raise ParsedError

    argparse_parse_args = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [program.__name__, *words])
        try:
            parsed(program.main)
        except ParsedError:
            return
    raise NotACommandError(f"{program.__name__} parses no arguments")


def script(path):
    if path not in PLACEHOLDERS and not (ROOT / path).is_file():
        raise NotACommandError(f"there is no file {path}")


def selection(words):
    """pytest: its files exist, a mark is registered, and a word to select by stands in the file."""
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    known = {re.match(r"\w+", mark)[0] for mark in marks}
    own = re.findall(r'addoption\(\s*"(--[\w-]+)"', (ROOT / "tests/conftest.py").read_text())
    files = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "-m":
            found = set(re.findall(r"\w+", words.pop(0))) - {"and", "or", "not"}
            if not found <= known:
                raise NotACommandError(f"no such mark: {found - known}")
        elif word == "-k":
            wanted = words.pop(0)
            text = " ".join(f"{(ROOT / file).read_text()} {sorted((ROOT / file).parent.iterdir())}" for file in files)
            if wanted not in text.replace("_000", "000"):
                raise NotACommandError(f"nothing in {files} has {wanted}")
        elif word.startswith("-"):
            if word not in own:
                raise NotACommandError(f"no such option: {word}")
        else:
            if not (ROOT / word).exists():
                raise NotACommandError(f"there is no file {word}")
            files.append(word)


def make(words):
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"\b([A-Z][A-Z_]+)\b", text))
    for word in words:
        name, given, _ = word.partition("=")
        if name not in (variables if given else targets):
            raise NotACommandError(f"the Makefile knows no {name}")


def pip(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if words[0] != "install":
        raise NotACommandError(f"pip {words[0]}")
    for word in words[1:]:
        named = re.fullmatch(r"(?:\.|nvcomm)\[(.*)\]", word)
        if named and not set(named[1].split(",")) <= set(extras):
            raise NotACommandError(f"there is no extra {named[1]}")


DOCUMENTED = [
    pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)}"[:150])
    for path in (*DOCUMENTS, *SCRIPTS)
    for words in dict.fromkeys(map(words_of, commands_in(path)))
    if words
]


def test_all_documents_are_read():
    assert len(DOCUMENTED) > 80
    named = {words.values[0][0] for words in DOCUMENTED}
    assert named >= {"nvcomm", "python", "torchrun", "mpiexec", "make", "pytest", "pip"}


@pytest.mark.parametrize("words", DOCUMENTED)
def test_a_documented_command_could_be_typed(words):
    check(list(words))


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "make test VIRTUAL_ENVIRONMENT=x",
        "pip install '.[cuda]'",
        "pytest tests/none.py",
        "pytest -m tpu tests/unit",
        "pytest tests/unit/test_env.py -k no_such_test",
        "pytest tests/unit/test_env.py --no-such-option",
        "nvcomm benchmark all_gather",
        "nvcomm bench all_gather --world nowhere",
        "nvcomm bench all_gather --world virtual --against torch",
        "nvcomm doctor --deep",
        "nvcomm compile --arch sm_90a --op topk",
        "nvcomm stress --repeats 5",
        "python -m stress --world moon",
        "python -m stress.nothing",
        "python -m benchmarks.nothing",
        "python -m benchmarks.all_reduce --row 1 --column 2",
        "python examples/99_none.py",
        "torchrun --nproc-per-rank 4 examples/01_all_gather.py",
        "torchrun --nproc-per-node 4 -m nvcomm bench reduce_scatter --world",
        "mpiexec -n 2 python examples/99_none.py",
    ],
)
def test_a_command_that_could_not_is_found(line, capsys):
    words = words_of(line)
    assert words
    with pytest.raises(NotACommandError):
        check(words)
