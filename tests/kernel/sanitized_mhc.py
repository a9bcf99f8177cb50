# SPDX-License-Identifier: Apache-2.0
"""Sublayer boundaries small enough for compute-sanitizer: rows of one CTA and of clusters. See test_sanitizer.py.

A small share of the GPU, because instrumentation changes how many CTAs are resident (docs/mailbox.md R8).
"""

from __future__ import annotations

import nvcomm
from tests.kernel.test_all_reduce_mhc import run_all_parts


def main() -> None:
    for world_size, hidden, share in ((1, 5120, 0.1), (4, 1280, 0.05)):
        with nvcomm.virtual_world(world_size, max_bytes=1 << 18, timeout_s=20, device_share=share) as world:
            run_all_parts(world, hidden, (1, 9))


if __name__ == "__main__":
    main()
