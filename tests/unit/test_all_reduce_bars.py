# SPDX-License-Identifier: Apache-2.0
"""The bars that the all-reduce benchmark prints: met and missed where they have to be."""

from __future__ import annotations

from benchmarks.all_reduce_bars import Figures, all_reduce_table, auto_verdict, ll_bar, mhc_bar, mhc_table, verdict


def test_bars_are_those_of_the_size_or_of_the_copy():
    assert ll_bar(Figures(1, (2.5, 3.0), (9.0, 9.0), 0)) == 2.6
    assert ll_bar(Figures(48, (2.5, 3.0), (4.0, 1.0), 0)) == 1.3 * 4.0 + 0.7
    assert mhc_bar(Figures(48, (2.5, 3.0), (4.0, 2.0), 0)) == 1.3 * 2.0 + 1.5


def test_verdicts():
    assert verdict(2.6, 2.6) == "2.60 met"
    assert verdict(2.61, 2.6) == "2.60 MISSED"
    assert verdict(1.0, float("nan")).endswith("MISSED")  # what was not measured is not met
    assert auto_verdict(Figures(6, (2.0, 2.5), (1, 1), 0)) == "LL met"
    assert auto_verdict(Figures(6, (2.0, 2.5), (1, 1), 1)) == "two-shot MISSED"


def test_tables_hold_a_line_for_each_number_of_rows():
    figures = [Figures(1, (2.5, 3.0), (2.0, 2.1), 0, 8.0), Figures(192, (20.0, 9.0), (8.0, 8.0), 1, 15.0)]
    lines = list(mhc_table(figures))
    assert len(lines) == 4
    assert lines[2] == "| 1 | 2.50 | 3.00 | 2.00 | 2.10 | 8.00 | LL met | 4.10 met | 4.00 met |"
    assert lines[3].endswith("| two-shot met | 11.90 met | 7.50 MISSED |")
    assert len({line.count("|") for line in lines}) == 1
    assert len({line.count("|") for line in all_reduce_table(figures)}) == 1
