# SPDX-License-Identifier: Apache-2.0
"""The protocol explorer: every rule of docs/mailbox.md switched on and off, and what each of them prevents.

    python -m nvcomm.reference.mailbox_model                    the table that fits into a minute
    python -m nvcomm.reference.mailbox_model --all              everything
    python -m nvcomm.reference.mailbox_model --trace R1-clears-2    the shortest failing run, step by step
    python -m nvcomm.reference.mailbox_model --markdown         the table for docs/model.md

Read in this order: `model_rules` (the rules as switches, kernels as lists of steps), `model_traffic` (what a collective
sends), `model_plan` (a scenario; addresses from `nvcomm.mailbox`), `model_steps` (what a step does), `model_machine`
(what the hardware may do), `model_search`, `model_residency` (R8) and `model_table` (what has to come out).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nvcomm.reference.model_table import Configuration, Outcome, ResidencyConfiguration, configurations

HEADER = ("configuration", "rule", "rules off", "ranks x words", "search", "verdict", "trace", "states", "seconds")
WIDTHS = (34, 7, 44, 13, 29, 9, 5, 8, 7)


def _cells(configuration: Configuration | ResidencyConfiguration, outcome: Outcome | None) -> tuple[str, ...]:
    left = (configuration.name, configuration.rule, configuration.off, configuration.setting, configuration.method)
    if outcome is None:
        return (*left, str(configuration.expected), "", "", "--all")
    length = str(outcome.length or "")
    return (*left, str(outcome.verdict), length, f"{outcome.states:,}", f"{outcome.seconds:.1f}")


def _text(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _trace(name: str) -> int:
    for configuration in configurations():
        if configuration.name == name:
            outcome = configuration.run()
            for number, line in enumerate(outcome.story, 1):
                _say(f"{number:4}  {line}")
            if not outcome.story:
                _say(f"{name} does not fail: {outcome.states:,} states")
            return int(outcome.verdict != configuration.expected)
    sys.stderr.write(f"no configuration is called {name!r}; the table lists their names\n")
    return 2


def _table(*, slow: bool, markdown: bool, prefix: str) -> int:
    chosen = [configuration for configuration in configurations() if configuration.name.startswith(prefix)]
    if not chosen:
        sys.stderr.write(f"no configuration's name begins with {prefix!r}; the whole table lists them\n")
        return 2
    line = _markdown if markdown else _text
    _say(line((*HEADER, "note") if markdown else HEADER))
    if markdown:
        _say("|" + "---|" * (len(HEADER) + 1))
    wrong, seconds, count = [], 0.0, 0
    for configuration in chosen:
        outcome = configuration.run() if slow or not configuration.slow else None
        cells = _cells(configuration, outcome)
        _say(line((*cells, configuration.note)) if markdown else line(cells))
        if outcome is None:
            continue
        count += 1
        seconds += outcome.seconds
        if outcome.verdict != configuration.expected:
            wrong.append(configuration.name)
            _say(f"!! {configuration.name}: expected {configuration.expected}: {outcome.detail}")
    _say("")
    _say(f"{count} configurations searched in {seconds:.0f} s; {len(wrong)} with another verdict than expected")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        0 if every verdict is the expected one, 1 if not, 2 for an unknown name.
    """
    parser = argparse.ArgumentParser(prog="nvcomm.reference.mailbox_model", description="The protocol explorer.")
    parser.add_argument("prefix", nargs="?", default="", help="only configurations whose name begins like this")
    parser.add_argument("--all", action="store_true", help="also what takes longer than a minute")
    parser.add_argument("--trace", metavar="NAME", help="the shortest failing run of a configuration, in words")
    parser.add_argument("--markdown", action="store_true", help="the table as markdown, with notes")
    options = parser.parse_args(arguments)
    if options.trace:
        return _trace(options.trace)
    return _table(slow=options.all, markdown=options.markdown, prefix=options.prefix)


if __name__ == "__main__":
    sys.exit(main())
