# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA small enough for compute-sanitizer: every kind of record, one CTA and clusters. See test_sanitizer.py."""

from __future__ import annotations

import torch

from decode.kv_cache import BF16, SCALED_FP8
from tests.kernel.test_sparse_mla import run_and_check
from tests.sparse_mla_cases import make_case


def main() -> None:
    torch.manual_seed(0)
    for options in (
        {"tokens": 3},
        {"tokens": 17},
        {"tokens": 24, "layout": BF16, "widths": (200, 384), "sink": True},
        {"tokens": 2, "heads": 8, "widths": (77, 0), "sink": True},
        {"tokens": 2, "heads": 32, "widths": (128, 128), "fp8_query": True, "masked": 1.0},
        {"tokens": 2, "layout": SCALED_FP8, "widths": (100, 200), "sink": True},
        {"tokens": 2, "layout": SCALED_FP8, "heads": 8, "widths": (128, 0)},
        {"tokens": 2, "layout": BF16, "widths": (128, 7)},
    ):
        run_and_check(make_case(**options))


if __name__ == "__main__":
    main()
