# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernel: the query of 16 heads, brought in once by the CTA and handed to every warp as A fragments.

A thread loads 32 dims of head thread / 16, makes F16 of them where the products are F16, and stores them so that
ldmatrix yields fragments in the order in which K's fragments come: for E4M3 rows, k 2i, 2i + 1 are dims 4i, 4i + 1 of a
step and k 2i + 8, 2i + 9 dims 4i + 2, 4i + 3; for BF16 rows the order is the natural one. The rows lie in the inbox,
which nobody writes to before this CTA has arrived at the cluster barrier for the first time.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from decode.kv_cache import BF16
from decode.sparse_mla_layout import GRANULE, HEADS, QUERY_ROW_BYTES, SparseMlaConfig
from nvcomm.ptx import cluster, memory, mma, shared

ROPE_DIM = 448
LOG2_E = 1.4426950408889634


def load_query(cfg: SparseMlaConfig, query: Int64, thread: Int32) -> list[tuple[Uint32, ...]]:
    """This thread's 16-byte pieces of head thread / 16: 2 of E4M3 or 4 of BF16. `query`: address of the first head."""
    itemsize = 1 if cfg.fp8_query else 2
    head = thread // 16
    if cfg.few_heads:
        # Rows 8 to 15 of the fragments count for nothing: they repeat the others.
        head = head % 8
    addr = query + Int64(head * (512 * itemsize) + thread % 16 * GRANULE)
    return [memory.ld_weak_v4(addr + piece * 256) for piece in range(2 * itemsize)]


def store_query(cfg: SparseMlaConfig, pieces: list[tuple[Uint32, ...]], base: Int32, thread: Int32) -> None:
    """Stores what `load_query` loaded in fragment order, and what undoes each head's scaling."""
    row = base + cfg.query_at + thread // 16 * QUERY_ROW_BYTES
    part = thread % 16
    if cfg.fp8_query:
        for piece, words in enumerate(pieces):
            pairs = [pair for word in words for pair in mma.cvt_e4m3x4_f16x2(word)]
            at = row + piece * 512 + part * 32
            cluster.st_shared_v4(at, pairs[0::2])
            cluster.st_shared_v4(at + GRANULE, pairs[1::2])
        return
    if cfg.layout == BF16:
        for piece, words in enumerate(pieces):
            cluster.st_shared_v4(row + piece * 256 + part * GRANULE, words)
        return
    scale, undo = power_of_two_scale(pieces)
    shared.st_shared_f32(base + cfg.undo_at + thread // 16 * 4, undo, part == 0)
    for piece, words in enumerate(pieces):
        converted = [mma.cvt_rn_f16x2(*(value * scale for value in mma.cvt_bf16x2_f32(word))) for word in words]
        # 8 dims: half of a step, so half of each of its two granules.
        near = row + piece * 256 + part // 2 * 32 + part % 2 * 8
        far = near + GRANULE
        out = [converted[0], converted[2], converted[1], converted[3]]
        if cfg.scaled and piece == 3:
            rope = part * 8 + piece * 128 >= ROPE_DIM
            out = [cutlass.select_(rope, a, b) for a, b in zip(words, out, strict=True)]
            natural = row + piece * 256 + part * GRANULE
            near = cutlass.select_(rope, natural, near)
            far = cutlass.select_(rope, natural + 8, far)
        shared.st_shared_v2(near, out[:2])
        shared.st_shared_v2(far, out[2:])


def power_of_two_scale(pieces: list[tuple[Uint32, ...]]) -> tuple[Float32, Float32]:
    """What brings the largest value of a head, over 16 lanes, into [2^14, 2^15) of F16; and its inverse.

    Whatever F16 then loses lies 2^-38 below the largest value.
    """
    sizes = [word & Uint32(0x7FFF7FFF) for words in pieces for word in words]
    largest = functools.reduce(mma.max_u16x2, sizes)
    for offset in (1, 2, 4, 8):
        largest = mma.max_u16x2(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
    largest = mma.max_u16x2(largest, largest >> Uint32(16)) & Uint32(0xFFFF)
    # Exponent fields: e of the largest value, 268 - e of the scale; clamped so that both powers are normal.
    exponent = Int32(268) - Int32(largest >> Uint32(7))
    exponent = cutlass.max(Int32(1), cutlass.min(Int32(253), exponent))
    return mma.bits_f32(Uint32(exponent) << Uint32(23)), mma.bits_f32(Uint32(Int32(254) - exponent) << Uint32(23))


def query_fragments(cfg: SparseMlaConfig, base: Int32, half: Int32, lane: Int32) -> list[tuple[Uint32, ...]]:
    """A fragments of the 16 k-steps of half of the dims."""
    at = fragment_address(cfg, base, half, lane)
    return [mma.ldmatrix_x4(at + step * 32) for step in range(16)]


def load_sink(cfg: SparseMlaConfig, sinks: Int64, thread: Int32) -> Float32:
    """The sink of head `thread`, for those threads that have one; `sinks`: address of the first head's."""
    return cute.arch.inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[sinks + Int64(thread) * 4],
        predicate=thread < (8 if cfg.few_heads else HEADS),
    )


def store_sink(cfg: SparseMlaConfig, sink: Float32, base: Int32, thread: Int32) -> None:
    """Puts the sinks into shared memory in units of log2."""
    shared.st_shared_f32(base + cfg.sinks_at + thread * 4, sink * Float32(LOG2_E), thread < HEADS)


def fragment_address(cfg: SparseMlaConfig, base: Int32, half: Int32, lane: Int32) -> Int32:
    """For ldmatrix: the A fragment of the first k-step of half of the dims; the next one lies 32 bytes further."""
    return base + cfg.query_at + lane % 16 * QUERY_ROW_BYTES + half * 512 + lane // 16 * GRANULE


def query_undo(cfg: SparseMlaConfig, base: Int32, lane: Int32) -> tuple[Float32, Float32]:
    """What undoes the scaling of head lane / 4 and of head + 8."""
    if cfg.fp8_query or cfg.layout == BF16:
        return Float32(1.0), Float32(1.0)
    at = base + cfg.undo_at + lane // 4 * 4
    return shared.ld_shared_f32(at), shared.ld_shared_f32(at + 32)
