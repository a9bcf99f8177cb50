# SPDX-License-Identifier: Apache-2.0
"""Latency against size: the median as a line, up to p99 as a band, one colour for each that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvcomm.bench.result import Result


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes the plot; the ending of `path` says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for impl in dict.fromkeys(result.impl for result in results):
        rows = [result for result in results if result.impl == impl and result.samples_us]
        sizes = [row.case.size_bytes for row in rows]
        medians, tails = ([row.percentile_us(percent) or 0.0 for row in rows] for percent in (50.0, 99.0))
        (line,) = axes.plot(sizes, medians, marker="o", label=f"{impl}, median; band to p99")
        axes.fill_between(sizes, medians, tails, alpha=0.2, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel="latency (us)", title=title)
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
