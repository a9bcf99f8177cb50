# SPDX-License-Identifier: Apache-2.0
"""Top-k small enough for compute-sanitizer: one CTA, clusters, every mode, overflow. See test_sanitizer.py."""

from __future__ import annotations

import torch

from decode.topk_config import TopkConfig
from tests.kernel.test_topk import check
from tests.topk_data import make_rows


def main() -> None:
    for config in (
        TopkConfig(512, 8, batches=2, threads=512),
        TopkConfig(512, 2, batches=4, deterministic=True),
        TopkConfig(1024, 1, batches=8),
        TopkConfig(2048, 4, batches=2, mode="blocks"),
    ):
        lengths = torch.tensor([400_003, 9001, -1], dtype=torch.int32, device="cuda")
        for kind in ("random", "constant", "some_nan"):
            check(config, make_rows(kind, 3, 400_003, 3, "cuda"), lengths)
        crowded = make_rows("random", 3, 400_003, 3, "cuda")
        # Of every step the 256 columns that one warp of one CTA reads.
        crowded[:, torch.arange(400_003, device="cuda") % (8 * config.step_vectors) < 256] = 9.0
        crowded += torch.rand_like(crowded)
        check(config, crowded, lengths)


if __name__ == "__main__":
    main()
