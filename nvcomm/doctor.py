# SPDX-License-Identifier: Apache-2.0
"""`nvcomm doctor`: what this machine can do, and why not. Creates nothing, and works when everything else is broken.

Only the standard library is imported here, every probe is guarded, and whatever might crash or hang (the driver, torch,
the compiler) is asked in a child process with a deadline.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvcomm._version import __version__
from nvcomm.doctor_rows import Row, guarded

SCHEMA = "nvcomm.doctor/1"
_COLOURS = {"OK": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[31m"}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0, or 1 if a row says FAIL, or 2 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="nvcomm doctor", description="What this machine can do, and why not. Creates nothing."
    )
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON to PATH; -: to stdout, and only that")
    parser.add_argument("--quick", action="store_true", help="ask versions only, do not import torch and the compiler")
    options = parser.parse_args(argv)
    told = report(quick=options.quick)
    text = json.dumps(told, indent=2)
    if options.json == "-":
        print(text)
    else:
        _print_table(told)
        if options.json is not None:
            try:
                Path(options.json).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                print(f"nvcomm doctor: {options.json} cannot be written: {error}", file=sys.stderr)
                return 2
    return int(told["verdict"] == "FAIL")


def report(*, quick: bool = False) -> dict[str, Any]:
    """The report, ready for JSON: `schema`, `nvcomm`, `verdict` (the worst status) and `rows`.

    Args:
        quick: leave out what takes seconds: whether torch and the compiler import.
    """
    rows = list(_rows(quick=quick))
    statuses = {row.status for row in rows}
    verdict = next(status for status in ("FAIL", "WARN", "OK") if status in statuses)
    fields = Row.__dataclass_fields__
    return {
        "schema": SCHEMA,
        "nvcomm": __version__,
        "verdict": verdict,
        "rows": [{name: getattr(row, name) for name in fields} for row in rows],
    }


def _rows(*, quick: bool) -> Iterator[Row]:
    def system() -> Iterator[Row]:
        from nvcomm import doctor_system

        for name, probe in doctor_system.PROBES.items():
            yield from guarded("system", name, probe)

    def gpu_and_packages() -> Iterator[Row]:
        from nvcomm import doctor_gpu, doctor_packages

        facts, reason = doctor_gpu.ask()
        yield from guarded("packages", "packages", lambda: doctor_packages.rows(bool(facts.get("gpus")), quick=quick))
        yield from guarded("gpu", "driver", lambda: doctor_gpu.driver_rows(facts, reason))
        for name, probe in doctor_gpu.PROBES.items():
            yield from guarded("gpu", name, functools.partial(probe, facts))

    yield from guarded("system", "system", system)
    yield from guarded("gpu", "GPU and packages", gpu_and_packages)


def _print_table(told: dict[str, Any]) -> None:
    colour = sys.stdout.isatty()
    width = max(len(row["name"]) for row in told["rows"])
    area = None
    print(f"nvcomm {told['nvcomm']}")
    for row in told["rows"]:
        if row["area"] != area:
            area = row["area"]
            print(f"\n{area}")
        status = f"{row['status']:4}"
        if colour:
            status = f"{_COLOURS[row['status']]}{status}\033[0m"
        print(f"  {status}  {row['name']:{width}}  {row['found']}")
        if row["fix"]:
            print(f"        {'':{width}}  -> {row['fix']}")
    counts = {status: sum(row["status"] == status for row in told["rows"]) for status in ("OK", "WARN", "FAIL")}
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
