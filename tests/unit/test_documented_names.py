# SPDX-License-Identifier: Apache-2.0
"""What the documents name is there: files, links, tests, modules and attributes, rules, environment variables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from nvcomm import env
from nvcomm.reference import model_table
from tests.host import mutants as host
from tests.kernel import mutants as kernel

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = " ".join(path.stem + path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
RULES = (ROOT / "docs" / "mailbox.md").read_text()


def missing_files(text, home):
    """Files in backticks, from the root of the repository; and targets of links, from the document."""
    named = re.findall(r"`((?:nvcomm|decode|stress|tests|benchmarks|docs|examples)/[\w./-]+)`", text)
    linked = [target for target in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in target]
    return [name for name in named if not any(ROOT.glob(f"{name}*"))] + [
        target for target in linked if not (home / target).exists()
    ]


def missing_tests(text):
    """Functions and files of tests."""
    return [name for name in re.findall(r"\btest_\w+", text) if name not in TESTS]


def missing_attributes(text):
    """Dotted names that begin with one of our packages."""
    found = []
    for name in sorted(set(re.findall(r"`((?:nvcomm|decode|stress)(?:\.\w+)+)", text))):
        words = name.split(".")
        for end in range(len(words), 0, -1):
            try:
                target = importlib.import_module(".".join(words[:end]))
            except ModuleNotFoundError as error:
                if not name.startswith(error.name or " "):  # of another package, which is not here
                    break
                continue
            for word in words[end:]:
                target = getattr(target, word, None)
            found += [name] if target is None else []
            break
    return found


def missing_rules(text):
    """Rules are cited as R1 to R13, and explained in docs/mailbox.md."""
    return [rule for rule in re.findall(r"\bR\d+\b", text) if not re.search(rf"\b{rule}\b", RULES)]


def missing_variables(text):
    known = {variable.name for variable in env.VARIABLES}
    return [name for name in re.findall(r"\bNVCOMM_[A-Z_]+[A-Z]\b", text) if name not in known]


CHECKS = (missing_tests, missing_attributes, missing_rules, missing_variables)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_named_is_there(document):
    text = document.read_text()
    missing = missing_files(text, document.parent)
    for check in CHECKS:
        missing += check(text)
    assert missing == []


def test_what_is_not_there_is_found():
    absent = "_".join(("test", "of", "nothing"))  # in pieces: this file is among those that are searched
    text = f"""`nvcomm/nothing.py`, [a page](nothing.md), {absent}, `nvcomm.nothing.at_all`, `nvcomm.Nothing`,
    R99 and NVCOMM_NOTHING"""
    assert missing_files(text, ROOT / "docs") == ["nvcomm/nothing.py", "nothing.md"]
    assert [check(text) for check in CHECKS] == [
        [absent],
        ["nvcomm.Nothing", "nvcomm.nothing.at_all"],
        ["R99"],
        ["NVCOMM_NOTHING"],
    ]


def test_counts_are_those_of_the_code():
    configurations = model_table.configurations()
    quick = [configuration for configuration in configurations if not configuration.slow]
    model = (ROOT / "docs" / "model.md").read_text()
    assert f"# {len(quick)} configurations, " in model
    assert f"# all {len(configurations)}, " in model
    assert f"\n{len(configurations)} configurations; none ended with another verdict than expected." in model
    reliability = (ROOT / "docs" / "reliability.md").read_text()
    for world, mutants in (("host", host.MUTANTS), ("emulated", kernel.MUTANTS), ("virtual", kernel.MUTANTS)):
        said = re.search(rf"tests\.mutation --world {world} --markdown`[^|]*?(\d+) of (\d+) caught", reliability)
        assert said.groups() == (str(len(mutants)),) * 2, world
