# SPDX-License-Identifier: Apache-2.0
"""What `nvcomm bench` says: a table while it runs; JSON, CSV and a plot at the end; and its exit code."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from nvcomm._version import __version__
from nvcomm.bench.plan import Plan
from nvcomm.bench.result import PERCENTILES, Result

SCHEMA = "nvcomm.bench/1"
# size count type redop impl, the percentiles, algbw busbw #wrong
_WIDTHS = (12, 10, 9, 6, 16, *(10 for _ in PERCENTILES), 9, 9, 7)
EXIT_OK, EXIT_WRONG, EXIT_USAGE, EXIT_UNSUPPORTED, EXIT_HANG = 0, 1, 2, 77, 124


class Report:
    """Takes rows as they come.

    Args:
        plan: what is measured.
        argv: as the user typed it.
        ranks: how many there are.
        where: the processor or GPU, for people.
    """

    def __init__(self, plan: Plan, argv: Sequence[str], ranks: int, where: str) -> None:
        self._plan = plan
        self._argv = list(argv)
        self._ranks = ranks
        self._where = where
        self._started = datetime.now(UTC)
        self._results: list[Result] = []
        if not plan.quiet:
            self._print_head()

    def add(self, result: Result) -> None:
        """One more row."""
        self._results.append(result)
        if self._plan.quiet:
            return
        fields = result.fields()
        columns = [fields["size_bytes"], fields["count"], fields["datatype"], fields["redop"], result.impl]
        columns += [_number(fields[f"{name}_us"], 2) for name in PERCENTILES]
        columns += [_number(result.algbw_gbps, 3), _number(result.busbw_gbps, 3)]
        print(_line([*columns, "N/A" if result.wrong is None else result.wrong]), flush=True)

    def finish(self) -> int:
        """Writes what was asked for; returns the exit code."""
        wrong = [result for result in self._results if result.wrong]
        slow = self.slower_than_floor()
        code = EXIT_WRONG if wrong or slow else EXIT_OK
        if not self._plan.quiet:
            self._print_tail(wrong, slow)
        if self._plan.json is not None:
            _write(self._plan.json, lambda file: file.write(json.dumps(self._json(slow, code), indent=1) + "\n"))
        if self._plan.csv is not None:
            _write(self._plan.csv, self._write_csv)
        if self._plan.markdown is not None:
            _write(self._plan.markdown, lambda file: file.write(self._markdown()))
        if self._plan.plot is not None:
            from nvcomm.bench.plot import draw

            draw(self._results, f"{self._plan.op}, {self._ranks} ranks, {self._where}", Path(self._plan.plot))
        return code

    def slower_than_floor(self) -> list[Result]:
        """Our rows whose median is above the floor; a row without samples is not among them, but wrong."""
        floor = self._plan.floor_us
        if floor is None:
            return []
        ours = [result for result in self._results if result.impl == "nvcomm"]
        return [result for result in ours if (median := result.percentile_us(50.0)) is not None and median > floor]

    def _print_head(self) -> None:
        plan = self._plan
        how = f"{plan.iters} calls" if plan.world == "host" else f"{plan.cudagraph} replays of {plan.iters} calls"
        print(f"# nvcomm {__version__}, {plan.op}, {plan.world} world, {self._ranks} ranks, {self._where}")
        print(f"# {self._started:%Y-%m-%d %H:%M} UTC, nvcomm bench {' '.join(self._argv)}")
        print(f"# {how} after {plan.warmup_iters} to warm up; the slowest rank counts")
        if not plan.check:
            print("# " + "!" * 20 + " THE DATA IS NOT CHECKED: these may be the times of a wrong result " + "!" * 20)
        head = ["size", "count", "type", "redop", "impl", *PERCENTILES, "algbw", "busbw", "#wrong"]
        units = ["(B)", "(elems)", "", "", "", *["(us)"] * len(PERCENTILES), "(GB/s)", "(GB/s)", ""]
        for names in (head, units):
            print("#" + _line(names)[1:].rstrip(), flush=True)

    def _print_tail(self, wrong: list[Result], slow: list[Result]) -> None:
        for impl in dict.fromkeys(result.impl for result in self._results):
            rates = [result.busbw_gbps for result in self._results if result.impl == impl]
            known = [rate for rate in rates if rate is not None]
            if known:
                print(f"# Avg bus bandwidth    : {sum(known) / len(known):.4f} ({impl})")
        for impl, refused in dict.fromkeys((result.impl, result.refused) for result in self._results):
            if refused is not None:
                print(f"# NOT MEASURED: {impl}: {refused}")
        for result in wrong:
            print(f"# WRONG DATA: {result.impl}, {result.case.size_bytes} bytes: {result.wrong} elements")
        for result in slow:
            median = result.percentile_us(50.0)
            print(f"# SLOWER THAN {self._plan.floor_us:g} us: {result.case.size_bytes} bytes took {median:.2f} us")

    def _markdown(self) -> str:
        """Median microseconds: a row for each size, a column for each that was measured."""
        impls = list(dict.fromkeys(result.impl for result in self._results))
        rows: dict[int, dict[str, float | None]] = {}
        for result in self._results:
            rows.setdefault(result.case.size_bytes, {})[result.impl] = result.percentile_us(50.0)
        lines = [f"| bytes | {' | '.join(impls)} |", "|---" * (len(impls) + 1) + "|"]
        for size, medians in rows.items():
            lines.append(f"| {size} | {' | '.join(_number(medians.get(impl), 2) for impl in impls)} |")
        return "\n".join(lines) + "\n"

    def _json(self, slow: list[Result], code: int) -> dict[str, Any]:
        from nvcomm import doctor

        plan = self._plan
        return {
            "schema": SCHEMA,
            "nvcomm": __version__,
            "started": self._started.isoformat(timespec="seconds"),
            "command": ["nvcomm", "bench", *self._argv],
            "op": plan.op,
            "world": plan.world,
            "ranks": self._ranks,
            "where": self._where,
            "iters": plan.iters,
            "warmup_iters": plan.warmup_iters,
            "cudagraph": plan.cudagraph,
            "checked": plan.check,
            "protocol": plan.protocol,
            "pdl": plan.pdl,
            "device_share": plan.device_share,
            "floor_us": plan.floor_us,
            "results": [result.fields(raw=plan.raw) for result in self._results],
            "slower_than_floor": [result.case.size_bytes for result in slow],
            "exit_code": code,
            "doctor": doctor.report(quick=True),
        }

    def _write_csv(self, file: IO[str]) -> None:
        rows = [result.fields() for result in self._results]
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _line(columns: Sequence[object]) -> str:
    return " ".join(f"{column!s:>{width}}" for column, width in zip(columns, _WIDTHS, strict=True))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _write(path: str, write: Any) -> None:
    if path == "-":
        write(sys.stdout)
        sys.stdout.flush()
        return
    with Path(path).open("w", encoding="utf-8") as file:
        write(file)
