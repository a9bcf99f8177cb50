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
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a small file
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for impl in dict.fromkeys(result.impl for result in results):
        rows = [result for result in results if result.impl == impl and result.samples_us]
        sizes = [row.case.size_bytes for row in rows]
        medians, tails = ([row.percentile_us(percent) or 0.0 for row in rows] for percent in (50.0, 99.0))
        (line,) = axes.plot(sizes, medians, marker="o", label=impl)
        axes.fill_between(sizes, medians, tails, alpha=0.2, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel="latency (us)", title=title)
    axes.set_xscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _short(value) if f"{value:e}"[0] in "235" else ""))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(title="median; band to p99")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def formats() -> list[str]:
    """The endings that `draw` takes, without the dot."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _short(value: float) -> str:
    """A tick: 64, 4K, 2M; fractions as they are."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
