# SPDX-License-Identifier: Apache-2.0
"""A measured row: percentiles over samples, and the bandwidths of nccl-tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which imports torch: the command that only starts the ranks does without
    from nvcomm.bench.case import Case

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}


@dataclass(frozen=True, slots=True)
class Result:
    """One size, measured once.

    Attributes:
        case: what was measured.
        impl: "nvcomm", or whom it was measured against.
        samples_us: time of a call, sample by sample; empty where the data was wrong, so that nothing was timed.
        wrong: elements that were wrong, over all ranks; None: not checked.
        refused: why another than nvcomm could not do it.
    """

    case: Case
    impl: str
    samples_us: Sequence[float]
    wrong: int | None
    refused: str | None = None

    def percentile_us(self, percent: float) -> float | None:
        """The smallest sample that `percent` of the samples do not exceed (nearest rank); None without samples."""
        if not self.samples_us:
            return None
        ordered = sorted(self.samples_us)
        # Rounded first: 99.9 % of 1000 is a little more than 999 in binary.
        return ordered[max(1, math.ceil(round(percent * len(ordered) / 100, 6))) - 1]

    @property
    def algbw_gbps(self) -> float | None:
        """Size over median time, 1e9 bytes a second."""
        median = self.percentile_us(50.0)
        return None if not median else self.case.size_bytes / median / 1e3

    @property
    def busbw_gbps(self) -> float | None:
        """`algbw_gbps`, as what the links carry."""
        return None if self.algbw_gbps is None else self.algbw_gbps * self.case.bus_factor

    def fields(self, *, raw: bool = False) -> dict[str, Any]:
        """The row for JSON and CSV; numbers are numbers, and what there is none of is None."""
        case = self.case
        told: dict[str, Any] = {
            "size_bytes": case.size_bytes,
            "count": case.count,
            "datatype": case.datatype,
            "redop": "none" if case.op == "all_gather" else "sum",
            "impl": self.impl,
            "samples": len(self.samples_us),
            **{f"{name}_us": self.percentile_us(percent) for name, percent in PERCENTILES.items()},
            "algbw_gbps": self.algbw_gbps,
            "busbw_gbps": self.busbw_gbps,
            "wrong": self.wrong,
            "refused": self.refused,
        }
        return told | {"raw_us": list(self.samples_us)} if raw else told
