# SPDX-License-Identifier: Apache-2.0
"""The digest of every source file that can change a kernel: its module and whatever of ours that imports, transitively.

Imports are read from the syntax tree, so nothing is executed, and an import inside a function counts;
one under `if TYPE_CHECKING` does not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from nvcomm.errors import UsageError

# Packages whose modules may take part in a kernel.
PACKAGES = frozenset({"nvcomm", "decode", "stress"})


@functools.cache
def source_digest(module_name: str) -> str:
    """SHA-256 over the names and contents of the sources of `module_name`, which must be imported already.

    Read once per process: a file that is edited later does not change the kernel in memory either.

    Raises:
        UsageError: the module has no file (a kernel typed at a prompt): the DSL could not read its source either.
    """
    digest = hashlib.sha256()
    files = _closure(module_name)
    if not files:
        raise UsageError(f"module {module_name} has no source file. Put the kernel's class into a file.")
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _closure(module_name: str) -> dict[str, Path]:
    """Module name -> file of the module and of all modules of ours that it reaches."""
    found: dict[str, Path] = {}
    todo = [module_name]
    while todo:
        name = todo.pop()
        path = _file_of(name)
        if path is None or name in found:
            continue
        found[name] = path
        todo.extend(candidate for candidate in _imports(name, path) if candidate.split(".")[0] in PACKAGES)
    return found


def _file_of(name: str) -> Path | None:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is not None:
        return Path(file)
    # Not imported (a deferred import that has not run): look beside its package.
    parent, _, leaf = name.rpartition(".")
    for folder in getattr(sys.modules.get(parent), "__path__", []) if parent else []:
        for candidate in (Path(folder) / f"{leaf}.py", Path(folder) / leaf / "__init__.py"):
            if candidate.exists():
                return candidate
    return None


def _imports(name: str, path: Path) -> Iterator[str]:
    """Names that `path` imports; `from a import b` yields both `a` and `a.b`, as b may be a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _running_nodes(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can take part in a run: imports for type checkers alone reach no kernel."""
    yield tree
    nodes = list(ast.iter_child_nodes(tree))
    if isinstance(tree, ast.If) and ast.unparse(tree.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        nodes = list(tree.orelse)
    for node in nodes:
        yield from _running_nodes(node)
