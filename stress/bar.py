# SPDX-License-Identifier: Apache-2.0
"""The progress bar, on standard error; plain text where that is no terminal."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stress.run import RunConfig

PLAIN_EVERY_S = 10.0


class ProgressBar:
    """Shows how far a run is: in replays where their number is known, else in seconds."""

    def __init__(self, console: Console, title: str, config: RunConfig) -> None:
        self._console = console
        self._title = title
        self._replays = config.replays
        self._started = time.monotonic()
        self._last_plain = self._started
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = config.replays if config.replays is not None else config.duration_s
        self._task = self._bar.add_task(title, total=None if total is None else round(total), facts="")

    def show(self, replays: int, bad_words: int) -> None:
        """Called by the runner now and then."""
        now = time.monotonic()
        facts = f"{replays:,} replays, {bad_words:,} wrong words"
        if self._console.is_terminal:
            done = replays if self._replays is not None else now - self._started
            self._bar.update(self._task, completed=round(done), facts=facts)
        elif now - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = now
            self._console.print(f"{self._title}: {facts}, {now - self._started:.0f} s", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
