# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: how a token's record is laid out, and a checked view of a cache as pages of bytes.

A *slot* is a token's place in a pool: slot = page * block + offset, `block` records to a page. In one page:

    plain FP8, 512 B     block x 512 E4M3, one scale for the whole tensor
    BF16, 1,024 B        block x 512 BF16
    scaled FP8, 584 B    block x (448 E4M3 + 64 BF16), then block x (7 UE8M0, one for 64 of the 448, and 1 unused byte)

So `[blocks, block, 584]` is only how many bytes a page of the third kind has, not where a record lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decode.arguments import grad_reasons, integer_reasons, tensor_reasons
from nvcomm.errors import UsageError

HEAD_DIM = 512
# What a 16-byte copy needs of every address in a page.
ALIGNMENT = 16
# Column lists hold int32.
MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """How a record of 512 values is stored.

    Attributes:
        name: for messages and compile keys.
        data_bytes: a token's values, contiguous, at `offset * data_bytes` in its page.
        scale_bytes: a token's scales, at `block * data_bytes + offset * scale_bytes` in its page; 0 for none.
        fp8_dims: leading values stored as E4M3; the others are BF16.
        dtypes: dtypes a cache of this layout may have.
    """

    name: str
    data_bytes: int
    scale_bytes: int
    fp8_dims: int
    dtypes: tuple[str, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of a token, scales included."""
        return self.data_bytes + self.scale_bytes


PLAIN_FP8 = RecordLayout("plain_fp8", 512, 0, 512, ("float8_e4m3fn", "uint8"))
BF16 = RecordLayout("bf16", 1024, 0, 0, ("bfloat16", "uint8"))
SCALED_FP8 = RecordLayout("scaled_fp8", 576, 8, 448, ("uint8", "float8_e4m3fn"))
LAYOUTS = (PLAIN_FP8, BF16, SCALED_FP8)


@dataclass(frozen=True, slots=True)
class RecordView:
    """A cache that passed every check of `record_view`.

    Attributes:
        layout: of its records.
        block: records to a page, a power of two.
        pages: (num_pages, block * record_bytes) uint8, strides (page stride, 1): the cache itself, not a copy.
    """

    layout: RecordLayout
    block: int
    pages: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Slots in the pool; a column list may name 0 to num_slots - 1."""
        return self.pages.shape[0] * self.block

    @property
    def page_stride_bytes(self) -> int:
        """From one page to the next."""
        return self.pages.stride(0)


def record_view(kv: torch.Tensor, block: int, layout: RecordLayout, *, offset_bits: int = 64) -> RecordView:
    """Views a cache as pages of records, after checking all that such a view relies on.

    Args:
        kv: (num_pages, block, record) of a dtype in `layout.dtypes`, where `record` values take `layout.record_bytes`;
            strides (any, record, 1). Pages may lie apart (other layers' bytes between them), not overlap.
        block: records to a page.
        layout: of a record.
        offset_bits: width of the byte offsets of whoever reads the view: 64 (the kernels here), or 32, signed.

    Raises:
        UsageError: something does not hold; the message lists everything that does not.
    """
    if unseen := _kind_reasons(kv, block, layout):
        raise UsageError(f"cannot view a cache as pages of records: {'; '.join(unseen)}.")
    reasons = grad_reasons("it", kv) + _shape_reasons(kv, block, layout)
    reasons += _memory_reasons(kv, block, layout, offset_bits)
    if reasons:
        raise UsageError(
            f"cannot view {tuple(kv.shape)} {kv.dtype} with strides {kv.stride()} as pages of {block} {layout.name} "
            f"records: " + "; ".join(reasons) + "."
        )
    pages = kv.view(torch.uint8) if kv.dtype != torch.uint8 else kv
    page_bytes = block * layout.record_bytes
    return RecordView(layout, int(block), pages.as_strided((kv.shape[0], page_bytes), (pages.stride(0), 1)))


def _kind_reasons(kv: torch.Tensor, block: int, layout: RecordLayout) -> list[str]:
    """Why nothing can be said about the rest."""
    reasons = tensor_reasons("kv", kv) + integer_reasons("block", block, 1, MAX_SLOTS)
    if not isinstance(layout, RecordLayout):
        known = ", ".join(one.name for one in LAYOUTS)
        reasons.append(f"layout is {layout!r}, wanted a RecordLayout of this module ({known})")
    return reasons


def _shape_reasons(kv: torch.Tensor, block: int, layout: RecordLayout) -> list[str]:
    """What is wrong with the tensor's description."""
    reasons = []
    if str(kv.dtype).removeprefix("torch.") not in layout.dtypes:
        reasons.append(f"the dtype is {kv.dtype}, wanted one of {', '.join(layout.dtypes)}")
    if block & (block - 1):
        reasons.append(f"block is {block}, wanted a power of two")
    if kv.dim() != 3:
        return [*reasons, f"it has {kv.dim()} dimensions, wanted 3 (num_pages, block, record)"]
    itemsize, record = kv.element_size(), layout.record_bytes
    if kv.shape[1] != block:
        reasons.append(f"its pages have {kv.shape[1]} records, wanted block = {block}")
    if kv.shape[2] * itemsize != record:
        reasons.append(f"its records have {kv.shape[2] * itemsize} bytes, wanted {record}")
    if kv.stride(2) != 1:
        reasons.append(f"the values of a record lie {kv.stride(2)} apart, wanted 1")
    if kv.shape[1] > 1 and kv.stride(1) * itemsize != record:
        reasons.append(f"its records lie {kv.stride(1) * itemsize} bytes apart, wanted {record}")
    stride, page = kv.stride(0) * itemsize, block * record
    if kv.shape[0] > 1 and stride < page:
        reasons.append(
            f"its pages overlap: they lie {stride} bytes apart and a page has {block} x {record} = {page} bytes, "
            f"so page 1 would begin inside page 0"
        )
    return reasons


def _memory_reasons(kv: torch.Tensor, block: int, layout: RecordLayout, offset_bits: int) -> list[str]:
    """What is wrong with where the bytes of such pages would be: bounds, alignment, limits."""
    reasons = []
    if offset_bits not in {32, 64}:
        reasons.append(f"offset_bits is {offset_bits}, wanted 32 or 64")
    if kv.dim() != 3:
        return reasons
    itemsize, num_pages = kv.element_size(), kv.shape[0]
    stride, page = kv.stride(0) * itemsize, block * layout.record_bytes
    extent = (num_pages - 1) * stride + page if num_pages else 0
    begin, storage = kv.storage_offset() * itemsize, kv.untyped_storage().nbytes()
    if begin + extent > storage:
        reasons.append(f"it ends at byte {begin + extent} of a storage of {storage} bytes")
    if num_pages and kv.data_ptr() % ALIGNMENT:
        reasons.append(f"it begins at an address that is {kv.data_ptr() % ALIGNMENT} modulo {ALIGNMENT}, wanted 0")
    if num_pages > 1 and stride % ALIGNMENT:
        reasons.append(f"its pages lie {stride} bytes apart, wanted a multiple of {ALIGNMENT}")
    if num_pages * block > MAX_SLOTS:
        reasons.append(f"it has {num_pages * block} slots, and a column list holds int32: at most {MAX_SLOTS}")
    if offset_bits == 32 and extent > 2**31:
        reasons.append(f"its last byte is at offset {extent - 1}, and 32-bit offsets end at {2**31 - 1}")
    return reasons
