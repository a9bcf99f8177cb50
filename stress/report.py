# SPDX-License-Identifier: Apache-2.0
"""The verdict, the JSON object and the table for people. Machine output never goes through rich."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from nvcomm.errors import UsageError
from stress.control import Control
from stress.run import Outcome, RunConfig

SCHEMA = "nvcomm.stress/1"
Verdict = Literal["proven", "unproven", "failed"]

EXIT_PROVEN, EXIT_BAD, EXIT_USAGE, EXIT_UNPROVEN, EXIT_UNSUPPORTED, EXIT_HANG = 0, 1, 2, 3, 77, 124


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about a run.

    Attributes:
        config: what was asked for.
        outcome: what was seen.
        control: what the negative control saw, or None where it was left out.
        machine: GPU, versions.
    """

    config: RunConfig
    outcome: Outcome
    control: Control | None
    machine: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """ "failed" as soon as anything was wrong; "proven" only where there is no doubt."""
        outcome = self.outcome
        if outcome.bad_words or outcome.first_bad or outcome.hang or outcome.audit:
            return "failed"
        return "unproven" if self.doubts else "proven"

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why a run in which nothing was wrong shows nothing."""
        found, control = [], self.control
        if self.config.protocol != "mailbox":
            found.append(f"{self.config.protocol} is known to be wrong")
        if not self.outcome.gathers:
            found.append("nothing was compared")
        if self.outcome.missing:
            found.append(f"the replays held no {', '.join(self.outcome.missing)}")
        if control is None:
            found.append("no control ran")
        elif not control.failed_as_it_must:
            found.append("the control did not fail")
        elif self.outcome.replays < control.replays_to_fail:
            needed = control.replays_to_fail
            found.append(f"the control took {needed} replays to fail; the run had {self.outcome.replays}")
        return tuple(found)

    @property
    def transport(self) -> str:
        """What the run ran on."""
        return self.outcome.transport if self.config.transport == "auto" else self.config.transport

    @property
    def exit_code(self) -> int:
        """What the process ends with. A hang behind wrong words is what they lead to, not what was found."""
        found_bad = self.outcome.bad_words and not (self.outcome.first_bad and self.outcome.first_bad.is_filling)
        if self.outcome.hang and not found_bad:
            return EXIT_HANG
        return {"proven": EXIT_PROVEN, "unproven": EXIT_UNPROVEN, "failed": EXIT_BAD}[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        config, outcome = self.config, self.outcome
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "doubts": list(self.doubts) if self.verdict == "unproven" else [],
            "replays": outcome.replays,
            "gathers": outcome.gathers,
            "bad_words": outcome.bad_words,
            "first_bad": outcome.first_bad.as_json() if outcome.first_bad else None,
            "control": self.control.as_json() if self.control else None,
            "audit": list(outcome.audit),
            "hang": outcome.hang.as_json() if outcome.hang else None,
            "seconds": round(outcome.seconds, 3),
            "seed": config.seed,
            "world": config.world,
            "ranks": config.ranks,
            "transport": self.transport,
            "protocol": config.protocol,
            "op": config.op,
            "pdl": config.pdl,
            "stats": list(outcome.stats),
            "machine": self.machine,
        }


def begin_json(target: str) -> None:
    """Empties the file before a run: one that is broken off leaves no earlier verdict behind.

    Raises:
        UsageError: it cannot be written.
    """
    if target != "-":
        _write(target, "")


def write_json(report: Report, target: str) -> None:
    """Writes the object to a file, or to standard output for "-".

    Raises:
        UsageError: it cannot be written.
    """
    text = json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        _write(target, text)


def _write(target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {target} cannot be written ({error.strerror}): choose another path.") from error


def show(report: Report, console: Console) -> None:
    """The table, and what was wrong."""
    config, outcome = report.config, report.outcome
    table = Table(title="nvcomm stress", show_header=False)
    per_gather = outcome.seconds / outcome.gathers * 1e6 if outcome.gathers else 0.0
    table.add_row("verdict", report.verdict.upper())
    if report.verdict == "unproven":
        table.add_row("why", "; ".join(report.doubts))
    table.add_row("world", f"{config.world}, {config.ranks} ranks, transport {report.transport}")
    table.add_row("protocol", f"{config.protocol}, {config.op}")
    table.add_row("replays", f"{outcome.replays:,}")
    noun = "gather" if config.op == "all_gather" else "collective"
    table.add_row(f"{noun}s", f"{outcome.gathers:,}")
    table.add_row("wrong words", f"{outcome.bad_words:,}")
    table.add_row("seconds", f"{outcome.seconds:.1f} ({per_gather:.1f} us a {noun})")
    table.add_row("control", report.control.summary if report.control else "left out")
    table.add_row("mailbox audit", "; ".join(outcome.audit) if outcome.audit else _audit_summary(outcome))
    table.add_row("seed", str(config.seed))
    table.add_row("machine", report.machine.get("gpu") or report.machine.get("cpu") or "unknown")
    console.print(table)
    if outcome.first_bad:
        console.print(f"first wrong word: {outcome.first_bad}", highlight=False, soft_wrap=True)
    if outcome.hang:
        for line in outcome.hang.lines():
            console.print(line, highlight=False, soft_wrap=True)


def _audit_summary(outcome: Outcome) -> str:
    return "not reached" if outcome.hang else "every word empty, every rank where its collectives end"
