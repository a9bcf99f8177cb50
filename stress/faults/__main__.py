# SPDX-License-Identifier: Apache-2.0
"""`python -m stress.faults`: every fault of the list, how it has to end, and how it ended.

Exit codes: 0 all as expected; 1 some not; 2 usage; 77 this machine cannot do it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stress.faults.table import Fault, Row, markdown
from stress.report import EXIT_BAD, EXIT_PROVEN, EXIT_UNSUPPORTED


def faults_of(world: str) -> tuple[Sequence[Fault[Any]], Callable[[Fault[Any]], Row]]:
    """The list of a world, and what runs a line of it.

    Raises:
        ImportError: the GPU worlds need the CUDA packages.
    """
    if world == "host":
        from stress.faults import host

        return host.FAULTS, host.run
    # Virtual ranks wait for each other, so each stream needs its own hardware queue; CUDA reads this when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from stress.faults import virtual

    return virtual.FAULTS, virtual.run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the list; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m stress.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=("host", "virtual"), default="host", help="virtual: all ranks on this GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this text in their name")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/reliability.md")
    given = parser.parse_args(argv)
    if given.world == "virtual":
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write("unsupported: --world virtual needs a GPU, and torch finds none\n")
            return EXIT_UNSUPPORTED
    faults, run = faults_of(given.world)
    chosen = [fault for fault in faults if given.only in fault.name]
    if not chosen:
        parser.error(f"--only {given.only!r}: no fault has this in its name; without it all are run and listed")
    rows = []
    for fault in chosen:
        row = run(fault)
        rows.append(row)
        sys.stderr.write(f"{'ok ' if row.good else 'BAD'} {row.seconds:5.2f} s  {row.name}: {row.seen}\n")
        for problem in row.problems:
            sys.stderr.write(f"      {problem}\n")
        if not row.good:
            sys.stderr.write(f"      wanted: {row.expected}\n")
    if given.markdown:
        sys.stdout.write(markdown(rows) + "\n")
    return EXIT_PROVEN if all(row.good for row in rows) else EXIT_BAD


if __name__ == "__main__":
    sys.exit(main())
