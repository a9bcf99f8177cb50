# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine for the report. Nothing here may fail a run."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from nvcomm import __version__, topology
from nvcomm.doctor_system import cpu_name

PACKAGES = ("torch", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")


def describe(*, gpu_index: int | None) -> dict[str, Any]:
    """Processor, GPU and versions; `gpu_index` is the GPU that was used, or None."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "nvcomm": __version__,
        "gpu": None,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    if gpu_index is not None:
        found = topology.devices()
        if not isinstance(found, topology.Unknown) and gpu_index < len(found):
            facts["gpu"] = found[gpu_index].name
            facts["gpu_arch"] = found[gpu_index].arch
        driver = topology.driver_version()
        facts["driver_cuda"] = None if isinstance(driver, topology.Unknown) else driver
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
