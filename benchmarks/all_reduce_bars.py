# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.all_reduce` holds its figures against, and the tables that say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LL_US = {1: 2.6, 6: 2.8}  # rows of 5,120 -> bar, four ranks on one H200
COPY_FACTOR = 1.3
LL_ABOVE_COPY_US = 0.7
MHC_ABOVE_COPY_US = 1.5
UNFUSED_FACTOR = 2.0


@dataclass(frozen=True)
class Figures:
    """Median times of one number of rows, us: by LL and by two-shot.

    Attributes:
        rows: of the call.
        ours: of the operation.
        copy: of the kernel that does the same and waits for nobody.
        auto: index of the protocol that "auto" takes.
        unfused: the same through an all-reduce and a compiled function; NaN where not measured.
    """

    rows: int
    ours: Sequence[float]
    copy: Sequence[float]
    auto: int
    unfused: float = float("nan")

    @property
    def taken(self) -> float:
        """What a user gets."""
        return self.ours[self.auto]


def verdict(seen: float, bar: float) -> str:
    """The bar and whether it is met."""
    return f"{bar:.2f} {'met' if seen <= bar else 'MISSED'}"


def ll_bar(figures: Figures) -> float:
    """Most us that LL may take."""
    return LL_US.get(figures.rows, COPY_FACTOR * figures.copy[0] + LL_ABOVE_COPY_US)


def mhc_bar(figures: Figures) -> float:
    """Most us that the fused boundary may take beside its copy."""
    return COPY_FACTOR * min(figures.copy) + MHC_ABOVE_COPY_US


def auto_verdict(figures: Figures) -> str:
    """Whether "auto" takes the faster protocol; within 2 % of each other, either is right."""
    name = ("LL", "two-shot")[figures.auto]
    return f"{name} {'met' if figures.taken <= 1.02 * min(figures.ours) else 'MISSED'}"


def all_reduce_table(all_figures: Sequence[Figures]) -> Iterator[str]:
    """Lines of the all-reduce's table."""
    yield "| rows | LL, us | two-shot, us | copy LL, us | copy two-shot, us | bar of LL, us | auto takes |"
    yield "|---|---|---|---|---|---|---|"
    for f in all_figures:
        times = " | ".join(f"{us:.2f}" for us in (*f.ours, *f.copy))
        yield f"| {f.rows} | {times} | {verdict(f.ours[0], ll_bar(f))} | {auto_verdict(f)} |"


def mhc_table(all_figures: Sequence[Figures]) -> Iterator[str]:
    """Lines of the boundary's table; bars are those of what "auto" takes."""
    yield (
        "| rows | fused LL, us | two-shot, us | copy LL, us | copy two-shot, us | unfused, us | auto takes "
        "| bar by copy, us | bar by unfused, us |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for f in all_figures:
        times = " | ".join(f"{us:.2f}" for us in (*f.ours, *f.copy, f.unfused))
        bars = f"{verdict(f.taken, mhc_bar(f))} | {verdict(f.taken, f.unfused / UNFUSED_FACTOR)}"
        yield f"| {f.rows} | {times} | {auto_verdict(f)} | {bars} |"
