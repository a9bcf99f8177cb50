# SPDX-License-Identifier: Apache-2.0
"""Gathers small enough for compute-sanitizer: one rank, then four ranks of one CTA each. See test_sanitizer.py.

One CTA a rank, because instrumentation changes how many are resident (docs/mailbox.md R8).
"""

from __future__ import annotations

import torch

import nvcomm
from tests.kernel.worlds import assert_gathered, words_of


def main() -> None:
    for world_size in (1, 4):
        with nvcomm.virtual_world(world_size, max_bytes=1 << 16, timeout_s=20) as world:
            for comm in world:
                comm.engine.max_ctas = 1
            for size in (1, 5, 16, 100, 4096, 70):
                xs = [words_of("mixed", size + 8, rank).view(torch.uint8)[3 : 3 + size] for rank in range(world_size)]
                assert_gathered(world.all_gather(xs), xs)


if __name__ == "__main__":
    main()
