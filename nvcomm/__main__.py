# SPDX-License-Identifier: Apache-2.0
"""`python -m nvcomm COMMAND ...`: each command loads its own module when it is called, and no earlier."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from nvcomm._version import __version__
from nvcomm.errors import NvcommError, UsageError
from nvcomm.exits import EXIT_INTERRUPTED, no_reader

# Command -> (module with `main(argv) -> exit code`, what it does).
COMMANDS = {
    "bench": ("nvcomm.bench.cli", "latency of the collectives, with the data checked"),
    "compile": ("nvcomm.compile", "compile every kernel for an architecture into the cache; needs no GPU"),
    "doctor": ("nvcomm.doctor", "what this machine can do, and why not"),
    "stress": ("stress.__main__", "replay graphs of gathers and check every word (python -m stress)"),
}

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (0 ok, 2 usage, others as the command says)."""
    parser = argparse.ArgumentParser(prog="nvcomm", description="Collectives for the decode step.")
    parser.add_argument("--version", action="version", version=f"nvcomm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the commands, the environment variables and what they are set to")
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning, add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "list" and rest:
        parser.error(f"list takes no arguments, got {' '.join(rest)}")
    try:
        if arguments.command == "list":
            code = _list()
        else:
            code = int(importlib.import_module(COMMANDS[arguments.command][0]).main(rest))
        sys.stdout.flush()
    except NvcommError as error:  # what a command does not say by itself, such as a variable that is not understood
        print(f"nvcomm {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        print(f"nvcomm {arguments.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return no_reader()
    return code


def _list() -> int:
    from nvcomm import env

    print(f"nvcomm {__version__}\n\ncommands")
    for name, (_, meaning) in COMMANDS.items():
        print(f"  {name:10} {meaning}")
    print("\nvariables (read now)")
    wrong = []
    for variable in env.VARIABLES:
        try:
            value = _as_text(env.read(variable)) or "unset"
        except UsageError as error:
            wrong.append(str(error))
            value = "NOT UNDERSTOOD"
        print(f"  {variable.name:26} {value:24} {variable.meaning}")
    wrong += [f"{name} is unknown: {hint}" for name, hint in env.unknown()]
    for message in wrong:
        print(f"nvcomm list: {message}", file=sys.stderr)
    return EXIT_USAGE if wrong else 0


def _as_text(value: object) -> str:
    """A setting as one would write it into its variable."""
    if isinstance(value, frozenset):
        return ",".join(sorted(value))
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
