# SPDX-License-Identifier: Apache-2.0
"""Where a contribution comes from: a tensor as it is, or the outputs of a rank's experts, added on the way.

Plain methods that run while a kernel is traced.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Int64, Uint32

from nvcomm.collectives.all_reduce_tree import narrow, widen
from nvcomm.collectives.tensors import load_chunk
from nvcomm.mailbox import CHUNK_BYTES, CHUNK_WORDS
from nvcomm.ptx import arith, mma
from nvcomm.ptx import memory as ptx

Chunk = tuple[Uint32, Uint32, Uint32, Uint32]


@dataclass(frozen=True)
class TensorSource:
    """A tensor of `num_bytes`, read in accesses of `width` bytes."""

    inp: Int64
    num_bytes: Int32
    width: int

    def chunk(self, index: Int32) -> Chunk:
        """Chunk `index`; it lies in the tensor, if only in part."""
        return load_chunk(self.inp, index, self.num_bytes, self.width)


@dataclass(frozen=True)
class ExpertSource:
    """A MoE output that still lies in expert order: `nvcomm.reference.collectives.moe_finalize`, chunk by chunk.

    Attributes:
        experts: (expert rows, hidden) bf16.
        weights: (rows, top_k) fp32.
        indices: (rows, top_k) int32; -1: not held, and nothing is read.
        shared: (rows, hidden) bf16, or 0.
        chunks_per_row: of a row of `hidden` values.
        top_k: experts of a row.
    """

    experts: Int64
    weights: Int64
    indices: Int64
    shared: Int64
    chunks_per_row: int
    top_k: int

    def chunk(self, index: Int32) -> Chunk:
        """Chunk `index`: an fma for each expert in order, then the shared one is added, then one rounding."""
        row = index // self.chunks_per_row
        place = Int64(index - row * self.chunks_per_row) * CHUNK_BYTES
        entries = [Int64(row * self.top_k + k) * 4 for k in range(self.top_k)]
        expert_rows = [Int32(ptx.ld_weak_b32(self.indices + entry)) for entry in entries]
        factors = [mma.bits_f32(ptx.ld_weak_b32(self.weights + entry)) for entry in entries]
        held = [Boolean(one >= 0) for one in expert_rows]
        row_bytes = self.chunks_per_row * CHUNK_BYTES
        parts = [
            ptx.ld_weak_v4_if(self.experts + Int64(one) * row_bytes + place, there)
            for one, there in zip(expert_rows, held, strict=True)
        ]
        has_shared = Boolean(self.shared != 0)
        common = ptx.ld_weak_v4_if(self.shared + Int64(row) * row_bytes + place, has_shared)
        words = []
        for i in range(CHUNK_WORDS):
            total = (Float32(0.0), Float32(0.0))
            for part, factor, there in zip(parts, factors, held, strict=True):
                values = widen(part[i], "bf16")
                added = [arith.fma_rn(value, factor, old) for value, old in zip(values, total, strict=True)]
                total = tuple(arith.select(there, new, old) for new, old in zip(added, total, strict=True))
            added = [arith.add_rn(old, value) for old, value in zip(total, widen(common[i], "bf16"), strict=True)]
            words.append(narrow([arith.select(has_shared, *pair) for pair in zip(added, total, strict=True)], "bf16"))
        return tuple(words)


Source = TensorSource | ExpertSource
