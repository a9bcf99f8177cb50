# SPDX-License-Identifier: Apache-2.0
"""The source digest follows imports of ours, and only those."""

from __future__ import annotations

import sys
import types

import pytest

from nvcomm import source_digest as module
from nvcomm.errors import UsageError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `pkg`: kernel imports helper, helper imports leaf inside a function, nobody imports stranger."""
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernel.py").write_text("import json\nfrom pkg import helper\n")
    (folder / "helper.py").write_text("def f():\n    from .leaf import VALUE\n    return VALUE\n")
    (folder / "leaf.py").write_text("VALUE = 1\n")
    (folder / "stranger.py").write_text("VALUE = 1\n")
    parent = types.ModuleType("pkg")
    parent.__file__, parent.__path__ = str(folder / "__init__.py"), [str(folder)]
    kernel = types.ModuleType("pkg.kernel")
    kernel.__file__ = str(folder / "kernel.py")
    monkeypatch.setitem(sys.modules, "pkg", parent)
    monkeypatch.setitem(sys.modules, "pkg.kernel", kernel)
    monkeypatch.setattr(module, "PACKAGES", frozenset({"pkg"}))
    return folder


def digest():
    module.source_digest.cache_clear()
    return module.source_digest("pkg.kernel")


@pytest.mark.parametrize("name", ["kernel.py", "helper.py", "leaf.py", "__init__.py"])
def test_a_change_of_any_file_that_is_reached_changes_the_digest(package, name):
    before = digest()
    assert digest() == before
    with (package / name).open("a") as file:
        file.write("# changed\n")
    assert digest() != before


def test_a_file_that_is_not_reached_does_not(package):
    before = digest()
    (package / "stranger.py").write_text("VALUE = 2\n")
    assert digest() == before


@pytest.mark.parametrize(
    ("condition", "reached"),
    [("TYPE_CHECKING", False), ("typing.TYPE_CHECKING", False), ("not TYPE_CHECKING", True), ("True", True)],
)
def test_imports_for_type_checkers_alone_do_not_count(package, condition, reached):
    (package / "kernel.py").write_text(f"from pkg import helper\nif {condition}:\n    from pkg import stranger\n")
    assert ("pkg.stranger" in module._closure("pkg.kernel")) == reached


def test_imports_beside_those_for_type_checkers_count(package):
    (package / "kernel.py").write_text("if TYPE_CHECKING:\n    import json\nelse:\n    from pkg import stranger\n")
    assert "pkg.stranger" in module._closure("pkg.kernel")


def test_the_kernels_of_the_library_reach_device_code():
    pytest.importorskip("cutlass")
    import nvcomm.collectives.all_gather  # noqa: F401

    reached = module._closure("nvcomm.collectives.all_gather")
    assert {"nvcomm.device", "nvcomm.mailbox", "nvcomm.ptx.memory"} <= reached.keys()
    assert "nvcomm.communicator" not in reached


def test_a_kernel_without_a_file_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "typed_at_a_prompt", types.ModuleType("typed_at_a_prompt"))
    with pytest.raises(UsageError, match="into a file"):
        module.source_digest("typed_at_a_prompt")
