# SPDX-License-Identifier: Apache-2.0
"""What `nvcomm doctor` reports: rows, and the two ways to get one that cannot take the report down with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nvcomm.errors import UsageError

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        area: "system", "packages" or "gpu".
        name: what was looked at.
        status: OK; WARN: something cannot be done, or only slowly; FAIL: nvcomm does not work here as it is.
        found: what was seen.
        fix: what to do about it; empty where nothing has to be done.
    """

    area: str
    name: str
    status: Status
    found: str
    fix: str = ""


Probe = Callable[[], Iterable[Row]]


def guarded(area: str, name: str, probe: Probe) -> Iterator[Row]:
    """The rows of `probe`; where it raises, a row that says so instead of the rest."""
    try:
        yield from probe()
    except UsageError as error:  # a variable whose value is not understood
        yield Row(area, name, "FAIL", str(error), "until then this cannot be looked at")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield Row(area, name, "WARN", f"could not be looked at: {text[:300]}", "report this: a probe should not fail")


def ask_child(code: str, timeout_s: float) -> tuple[Any, str]:
    """Runs Python `code` in a child that prints JSON last: (its answer, ""), or (None, why there is none).

    A library that crashes, hangs or prints takes only the child with it.
    """
    try:
        # -B: it leaves no compiled files behind.
        done = subprocess.run(
            [sys.executable, "-B", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return None, f"no process could be started: {error}"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            return json.loads(lines[-1]), ""
        except ValueError:
            return None, f"an answer that is not JSON: {lines[-1][:200]}"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return None, f"{last[:300]} ({ended})"
