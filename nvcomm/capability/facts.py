# SPDX-License-Identifier: Apache-2.0
"""What has to be equal on all ranks: versions, configuration, and answers that all ranks should give alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from nvcomm._version import __version__
from nvcomm.capability.requirement import Requirement, label
from nvcomm.capability.texts import clipped, described, digest

if TYPE_CHECKING:
    from nvcomm.group import JSON

# What compiles and maps memory: ranks that differ here may run different kernels.
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")

_FACTS_BYTES, _FACT_CHARS = 24 << 10, 200


def facts_of(
    requirements: Sequence[Requirement],
    found: Sequence[tuple[Requirement, list[str]]],
    config: Mapping[str, Any],
    packages: Sequence[str],
) -> dict[str, str]:
    """What has to be equal on all ranks: fact -> text."""
    facts = {"requirements": ", ".join(f"{label(each)} ({each.scope})" for each in requirements) or "none"}
    facts["version of nvcomm"] = __version__
    facts |= {f"version of {name}": _version(name) for name in packages}
    facts |= {str(name): _stable(value) for name, value in config.items()}
    for each, reasons in found:
        if each.scope == "same":
            facts[f"answer to {label(each)}"] = "; ".join(reasons) or "holds"
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # broken metadata differs from sound metadata, and must not skip the vote
        return f"unknown ({type(error).__name__})"


def _stable(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except Exception as error:  # a circular structure, keys that cannot be sorted, a repr that fails
        return f"cannot be compared ({described(error)})"


def bounded(facts: Mapping[str, str]) -> dict[str, JSON]:
    """The facts within their limit: long values keep their beginning and a digest, far too many become one digest."""
    short: dict[str, JSON] = {
        clipped(name, _FACT_CHARS): text if len(text) <= _FACT_CHARS else f"{text[:80]}... ({digest(text)})"
        for name, text in facts.items()
    }
    if len(json.dumps(short)) <= _FACTS_BYTES:
        return short
    return {"configuration": f"{len(facts)} items ({digest(json.dumps(dict(facts), sort_keys=True))})"}
