# SPDX-License-Identifier: Apache-2.0
"""Rows about Python packages: the versions that are installed, and whether torch and the compiler import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from nvcomm._version import __version__
from nvcomm.doctor_rows import Row, ask_child

IMPORT_TIMEOUT_S = 120.0
_INSTALL_GPU = "pip install 'nvcomm[cu13]'"
# Distribution -> (least version, first version that is too new, needed by, how to get it).
_WANTED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, str, str]] = {
    "torch": ((2, 11), None, "all", "pip install 'torch>=2.11'"),
    "numpy": ((2, 0), None, "all", "pip install 'numpy>=2'"),
    "nvidia-cutlass-dsl": ((4, 8), (4, 9), "gpu", _INSTALL_GPU),
    "apache-tvm-ffi": ((0, 1, 9), None, "gpu", _INSTALL_GPU),
    "cuda-bindings": ((13,), None, "gpu", _INSTALL_GPU),
}
_OPTIONAL = ("mpi4py", "matplotlib", "rich")
_TORCH = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, "
    "'sees_gpus': torch.cuda.device_count(), 'distributed': torch.distributed.is_available()}))"
)
# The DSL makes a cache folder in TMPDIR when it is imported; where it cannot, it goes on without.
_DSL = (
    "import json, os; os.environ['TMPDIR'] = os.devnull; import cutlass, cutlass.cute; "
    "print(json.dumps({'version': cutlass.__version__}))"
)


def rows(has_gpu: bool, *, quick: bool) -> Iterator[Row]:
    """One row a package; what only GPU worlds need is a failure only where there is a GPU."""
    yield Row("packages", "nvcomm", "OK", __version__)
    for name in _WANTED:
        yield _wanted(name, has_gpu)
    if not quick:
        yield from _torch(has_gpu)
        yield from _dsl(has_gpu)
    found = {name: version for name in _OPTIONAL if (version := _version(name)) is not None}
    yield Row("packages", "optional", "OK", ", ".join(f"{name} {version}" for name, version in found.items()) or "none")


def _wanted(name: str, has_gpu: bool) -> Row:
    least, too_new, needed_by, fix = _WANTED[name]
    version = _version(name)
    missing = "FAIL" if needed_by == "all" or has_gpu else "WARN"
    if version is None:
        why = "" if needed_by == "all" else "; GPU worlds need it"
        return Row("packages", name, missing, f"not installed{why}", fix)  # type: ignore[arg-type]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
    if numbers < least:
        return Row("packages", name, missing, f"{version}, too old", fix)  # type: ignore[arg-type]
    if too_new is not None and numbers >= too_new:
        return Row("packages", name, "WARN", f"{version}, newer than what nvcomm was tested with", fix)
    return Row("packages", name, "OK", version)


def _torch(has_gpu: bool) -> Iterator[Row]:
    if _version("torch") is None:
        return
    answer, reason = ask_child(_TORCH, IMPORT_TIMEOUT_S)
    if answer is None:
        yield Row(
            "packages", "import torch", "FAIL", reason, "reinstall torch; python -c 'import torch' shows the rest"
        )
        return
    found = f"CUDA {answer['cuda'] or 'none'}, sees {answer['sees_gpus']} GPUs"
    if not answer["distributed"]:
        yield Row(
            "packages", "import torch", "FAIL", f"{found}, without torch.distributed", "install another build of torch"
        )
    elif has_gpu and not answer["sees_gpus"]:
        fix = "install a torch for CUDA 13; if it is one, compare its CUDA with the driver's"
        yield Row("packages", "import torch", "FAIL", found, fix)
    else:
        yield Row("packages", "import torch", "OK", found)


def _dsl(has_gpu: bool) -> Iterator[Row]:
    if _version("nvidia-cutlass-dsl") is None:
        return
    answer, reason = ask_child(_DSL, IMPORT_TIMEOUT_S)
    if answer is None:
        status = "FAIL" if has_gpu else "WARN"
        yield Row("packages", "import cutlass.cute", status, reason, f"{_INSTALL_GPU}; all its wheels in one version")  # type: ignore[arg-type]
    else:
        yield Row("packages", "import cutlass.cute", "OK", f"CuTe DSL {answer['version']}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
