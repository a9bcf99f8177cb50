# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that nvcomm reads, in one table (docs/env.md is tested against it).

Variables are read when `settings()` is called, never at import: a test or a launcher may set them late. A value that
cannot be parsed is an error that names the variable; an `NVCOMM_*` name that does not exist is warned about once, with
the nearest name that does.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvcomm.errors import UsageError

PREFIX = "NVCOMM_"
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of ours.

    Attributes:
        name: `NVCOMM_...`.
        default: the text that stands for "not set", as documented; "" where unset is a state of its own.
        wanted: the accepted values, for people.
        meaning: what it does, one line.
        parse: text -> value; raises ValueError.
    """

    name: str
    default: str
    wanted: str
    meaning: str
    parse: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the variables say at one moment.

    Attributes:
        debug: log level, or None: no log handler is attached.
        debug_file: path pattern of the log (%h host, %p process, %r rank), or None: stderr.
        timeout_s: bound of every wait, in seconds.
        device_checks: 0 none; 1 overlap and agreement checks.
        cache_dir: where compiled kernels are kept.
        disable_multicast: create and use no multicast object.
        dump: what the compiler writes beside its cache: "ptx", "sass".
    """

    debug: str | None
    debug_file: str | None
    timeout_s: float
    device_checks: int
    cache_dir: Path
    disable_multicast: bool
    dump: frozenset[str]


def _one_of(*words: str) -> Callable[[str], str | None]:
    def parse(text: str) -> str | None:
        if text and text.upper() not in words:
            raise ValueError(text)
        return text.upper() or None

    return parse


def _timeout(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        raise ValueError(text)
    return value


def _small_int(limit: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value <= limit:
            raise ValueError(text)
        return value

    return parse


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _dump(text: str) -> frozenset[str]:
    kinds = frozenset(part.strip().lower() for part in text.split(",") if part.strip())
    if not kinds <= {"ptx", "sass"}:
        raise ValueError(text)
    return kinds


VARIABLES = (
    Variable(
        "NVCOMM_DEBUG",
        "",
        "WARN, INFO or TRACE",
        "attach a log handler at this level; unset: none",
        _one_of("WARN", "INFO", "TRACE"),
    ),
    Variable(
        "NVCOMM_DEBUG_FILE",
        "",
        "a path; %h host, %p process, %r rank",
        "write the log to this file instead of stderr",
        lambda text: text or None,
    ),
    Variable(
        "NVCOMM_TIMEOUT_S",
        "30",
        f"seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}",
        "bound of every wait for a peer, on the host and in kernels",
        _timeout,
    ),
    Variable(
        "NVCOMM_DEVICE_CHECKS",
        "0",
        "0 or 1",
        "1: overlapping and differing calls are recorded (R7, R11), at the price of a header and an atomic a call",
        _small_int(1),
    ),
    Variable(
        "NVCOMM_CACHE_DIR",
        "~/.cache/nvcomm",
        "a folder of the user's own",
        "where compiled kernels are kept",
        _path,
    ),
    Variable(
        "NVCOMM_DISABLE_MULTICAST",
        "0",
        "0 or 1",
        "1: create and use no NVLink multicast object",
        lambda text: bool(_small_int(1)(text)),
    ),
    Variable(
        "NVCOMM_DUMP",
        "",
        "ptx, sass or both with a comma",
        "keep the compiler's text output beside the cached kernel",
        _dump,
    ),
)

# Variables of other tools, read by nvcomm and documented with them.
OTHERS = {
    "NCCL_NVLS_ENABLE": "0 switches multicast off here too",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1 switches multicast off here too",
    "NVSHMEM_DISABLE_NVLS": "1 switches multicast off here too",
    "CUTE_DSL_ARCH": "compile for this architecture (sm_90a, sm_100a, sm_103a) instead of the GPU's own",
    "XDG_CACHE_HOME": "where the default of NVCOMM_CACHE_DIR lies, instead of ~/.cache",
    "CUDA_VISIBLE_DEVICES": "shown by doctor, as it hides and renumbers GPUs",
    "CUDA_MPS_PIPE_DIRECTORY": "where doctor looks for the MPS daemon, instead of /tmp/nvidia-mps",
    "TMPDIR": "where the ranks of one host meet while they exchange memory handles",
    "RANK": "torchrun: this process's rank",
    "WORLD_SIZE": "torchrun: number of ranks",
    "LOCAL_RANK": "torchrun: this process's rank on its host",
    "MASTER_ADDR": "torchrun: where the store is in which the ranks meet",
    "MASTER_PORT": "torchrun: the port of that store",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun: True where it serves that store itself, else rank 0 does",
    "PMI_RANK": "MPICH's mpiexec: set where it started this process",
    "PMI_SIZE": "MPICH's mpiexec: number of ranks, which has to be mpi4py's",
    "PMIX_RANK": "a launcher that speaks PMIx: set where it started this process",
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpiexec: set where it started this process",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec: number of ranks, which has to be mpi4py's",
}


def settings() -> Settings:
    """Reads the variables.

    Raises:
        UsageError: a value cannot be parsed; the message names the variable, the value seen and the values wanted.
    """
    _warn_unknown()
    return Settings(**{variable.name.removeprefix(PREFIX).lower(): read(variable) for variable in VARIABLES})  # type: ignore[arg-type]


def other(name: str) -> str | None:
    """The value of a variable of another tool, which must be in `OTHERS`; None when unset or empty."""
    if name not in OTHERS:
        raise KeyError(f"{name} is not in nvcomm.env.OTHERS: add it there and to docs/env.md")
    return os.environ.get(name) or None


def is_set(name: str) -> bool:
    """Whether a variable of ours is set, to its default or to anything else."""
    if name not in {variable.name for variable in VARIABLES}:
        raise KeyError(f"{name} is not in nvcomm.env.VARIABLES")
    return bool(os.environ.get(name, "").strip())


def multicast_disabled_by() -> str | None:
    """The variable that switches multicast off, as `NAME=value`, or None. Ours is named before the others'."""
    if settings().disable_multicast:
        return "NVCOMM_DISABLE_MULTICAST=1"
    if (other("NCCL_NVLS_ENABLE") or "").strip() == "0":
        return "NCCL_NVLS_ENABLE=0"
    for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        value = (other(name) or "0").strip()
        # Both tools take several spellings of true; whatever is not plainly false keeps multicast off.
        if value.lower() not in {"0", "false", "f", "no", "n", "off"}:
            return f"{name}={value}"
    return None


def read(variable: Variable) -> object:
    """What one variable of ours says; raises UsageError as `settings`."""
    text = os.environ.get(variable.name, "").strip()
    if not text and variable.name == "NVCOMM_CACHE_DIR" and (cache_home := other("XDG_CACHE_HOME")):
        return _path(cache_home) / "nvcomm"
    try:
        return variable.parse(text or variable.default)
    except ValueError:
        raise UsageError(
            f"{variable.name}={text!r} is not understood; wanted {variable.wanted}. Change or unset the variable."
        ) from None
    except RuntimeError:  # no HOME, and the user is in no list of users: a container, perhaps
        raise UsageError(
            f"{variable.name} would be {text or variable.default}, and this user has no home: set it to a folder of "
            "yours, or set HOME."
        ) from None


def unknown() -> list[tuple[str, str]]:
    """The `NVCOMM_*` variables that are set and do not exist, each with what to do."""
    known = [variable.name for variable in VARIABLES]
    found = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            found.append((name, f"did you mean {nearest[0]}?" if nearest else "docs/env.md has the list."))
    return found


def _warn_unknown() -> None:
    for name, hint in unknown():
        _warn_once(name, hint)


@functools.cache
def _warn_once(name: str, hint: str) -> None:
    warnings.warn(f"nvcomm does not know the environment variable {name}: {hint}", stacklevel=4)
