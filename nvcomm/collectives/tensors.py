# SPDX-License-Identifier: Apache-2.0
"""Chunks of a caller's tensor, for kernels: any alignment, nothing outside the tensor read or written.

Plain functions that run while a kernel is traced: their `if` and `for` are over compile-time values.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS, WORD_BYTES
from nvcomm.ptx import memory as ptx

ACCESS_BYTES = (16, 8, 4, 2, 1)


def access_bytes(*values: int) -> int:
    """The widest access that addresses and sizes `values` are all multiples of: 16, 8, 4, 2 or 1 bytes."""
    return next(width for width in ACCESS_BYTES if all(value % width == 0 for value in values))


def load_chunk(base: Int64, chunk: Int32, num_bytes: Int32, width: int) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes at `base + 16 * chunk` in accesses of `width` bytes, with 0 beyond `num_bytes`.

    `base` and `num_bytes` are multiples of `width`.
    """
    addr = base + Int64(chunk) * CHUNK_BYTES
    if width == CHUNK_BYTES:
        return ptx.ld_weak_v4(addr)
    left = num_bytes - chunk * CHUNK_BYTES
    words = [Uint32(0)] * CHUNK_WORDS
    for offset in range(0, CHUNK_BYTES, width):
        piece = ptx.ld_weak_if(addr, offset, width, Boolean(left > offset))
        word, shift = offset // WORD_BYTES, 8 * (offset % WORD_BYTES)
        words[word] = words[word] | (Uint32(piece) << Uint32(shift))
        if width > WORD_BYTES:
            words[word + 1] = Uint32(piece >> Uint64(32))
    return tuple(words)


def store_chunk(base: Int64, chunk: Int32, num_bytes: Int32, width: int, words: list[Uint32]) -> None:
    """The bytes of 4 words that lie inside `num_bytes` to `base + 16 * chunk`, in accesses of `width` bytes."""
    addr = base + Int64(chunk) * CHUNK_BYTES
    if width == CHUNK_BYTES:
        ptx.st_weak_v4(addr, words)
        return
    left = num_bytes - chunk * CHUNK_BYTES
    for offset in range(0, CHUNK_BYTES, width):
        word, shift = offset // WORD_BYTES, 8 * (offset % WORD_BYTES)
        piece = words[word] >> Uint32(shift)
        if width > WORD_BYTES:
            piece = Uint64(words[word]) | (Uint64(words[word + 1]) << Uint64(32))
        ptx.st_weak_if(addr, offset, width, Boolean(left > offset), piece)
