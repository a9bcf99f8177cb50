# SPDX-License-Identifier: Apache-2.0
"""Reductions small enough for compute-sanitizer: one rank, then four ranks of few CTAs. See test_sanitizer.py.

A small share of the GPU, because instrumentation changes how many CTAs are resident (docs/mailbox.md R8).
"""

from __future__ import annotations

import torch

import nvcomm
from nvcomm.reference import collectives as reference
from tests.kernel.test_all_reduce import PROTOCOLS, assert_same, inputs


def main() -> None:
    for world_size in (1, 4):
        with nvcomm.virtual_world(world_size, max_bytes=1 << 16, timeout_s=20, device_share=0.01) as world:
            for size in (1, 7, 8, 1000, 15360):
                xs = [x[size % 2 :] for x in inputs(world_size, (size + size % 2,), torch.bfloat16, size)]
                for protocol in PROTOCOLS:
                    assert_same(world.all_reduce(xs, protocol=protocol), reference.all_reduce(xs))
                rows = [x.view(-1, 1) for x in xs]
                for part, wanted in zip(world.reduce_scatter(rows), reference.reduce_scatter(rows), strict=True):
                    assert_same([part], wanted)


if __name__ == "__main__":
    main()
