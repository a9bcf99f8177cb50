# SPDX-License-Identifier: Apache-2.0
"""A program of collectives that a compiler would like to shorten, for the tests of the torch operators."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

PROGRAM = ["reduce_scatter", "all_reduce", "all_gather", "all_gather", "reduce_scatter"]


def unused_and_twice(ops):
    """`PROGRAM`: the first result is used last, the second by nobody, and the two gathers are alike."""

    def step(x):
        last = ops.reduce_scatter(x)
        ops.all_reduce(x)
        left, right = ops.all_gather(x * 2), ops.all_gather(x * 2)
        return ops.reduce_scatter((left + right).flatten(0, 1)) + 1, last

    return step


def compile_with(step, backend, **options):
    """`step` compiled whole; nothing of an earlier compilation is left."""
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    return torch.compile(step, backend=backend, fullgraph=True, **options)
