# SPDX-License-Identifier: Apache-2.0
"""Virtual worlds and payloads for the kernel tests."""

from __future__ import annotations

import torch

from nvcomm.mailbox import EMPTY, ESCAPE

DTYPES = (
    *(torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
)


def words_of(kind: str, count: int, seed: int) -> torch.Tensor:
    """`count` words on the GPU, int32: "random", only "empty", only "escape", or all three "mixed"."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, device="cuda", generator=generator)
    if kind == "random":
        return words.to(torch.int32)
    which = torch.randint(0, 3, (count,), device="cuda", generator=generator)
    if kind != "mixed":
        which.fill_({"empty": 0, "escape": 1}[kind])
    reserved = torch.where(which == 0, EMPTY - 2**32, ESCAPE - 2**32)
    return torch.where(which < 2, reserved, words).to(torch.int32)


def coded(rank: int, call: int, count: int) -> torch.Tensor:
    """`count` words on the GPU that tell their rank, call and index: a stale or foreign one is recognised."""
    index = torch.arange(count, dtype=torch.int64, device="cuda")
    return ((rank << 28) | ((call & 0xFF) << 20) | (index & 0xFFFFF)).to(torch.int32)


def assert_gathered(ys: list[torch.Tensor], xs: list[torch.Tensor]) -> None:
    """Every rank has every rank's bits; says where the first difference is."""
    want = torch.stack(xs)
    for rank, y in enumerate(ys):
        got_bytes, want_bytes = y.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
        wrong = (got_bytes != want_bytes).nonzero()
        if len(wrong):
            first = int(wrong[0])
            row = first // max(1, xs[0].nbytes)
            raise AssertionError(
                f"rank {rank}: {len(wrong)} wrong bytes, the first at row {row}, byte {first - row * xs[0].nbytes}: "
                f"got {int(got_bytes[first])}, wanted {int(want_bytes[first])}"
            )
