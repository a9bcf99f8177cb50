# SPDX-License-Identifier: Apache-2.0
"""record_view: every refusal with its reason, all reasons at once, and views that must not be refused."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode.kv_cache import BF16, LAYOUTS, PLAIN_FP8, SCALED_FP8, record_view  # noqa: E402
from decode.reference.sparse_mla import read_records, write_records  # noqa: E402
from nvcomm.errors import UsageError  # noqa: E402

DTYPES = {PLAIN_FP8.name: torch.float8_e4m3fn, BF16.name: torch.bfloat16, SCALED_FP8.name: torch.uint8}


def cache(layout, pages=4, block=8, gap=0, dtype=None, offset=0):
    """A cache whose pages lie `gap` bytes apart."""
    dtype = dtype or DTYPES[layout.name]
    itemsize = dtype.itemsize
    stride = (block * layout.record_bytes + gap) // itemsize
    record = layout.record_bytes // itemsize
    storage = torch.zeros((pages * stride + offset + 64), dtype=dtype)
    return storage.as_strided((pages, block, record), (stride, record, 1), offset)


def refusal(kv, block, layout, **options):
    with pytest.raises(UsageError) as caught:
        record_view(kv, block, layout, **options)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("gap", [0, 64])
def test_view_is_the_cache_itself(layout, gap):
    kv = cache(layout, gap=gap)
    view = record_view(kv, 8, layout)
    assert view.num_slots == 32
    assert view.page_stride_bytes == 8 * layout.record_bytes + gap
    assert view.pages.shape == (4, 8 * layout.record_bytes)
    assert view.pages.data_ptr() == kv.data_ptr()
    view.pages[3, -1] = 7
    assert kv.view(torch.uint8)[3, 7, -1] == 7


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_bytes_are_accepted_for_every_layout(layout):
    assert record_view(cache(layout, dtype=torch.uint8), 8, layout).num_slots == 32


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_records_come_back_and_touch_nothing_else(layout):
    torch.manual_seed(1)
    kv = cache(layout, gap=64)
    view = record_view(kv, 8, layout)
    slots = torch.tensor([0, 7, 8, 31, 17])
    values = torch.randn(5, 512)
    write_records(view, slots, values)
    others = torch.tensor([slot for slot in range(32) if slot not in slots.tolist()])
    assert (read_records(view, others) == 0).all()
    torch.testing.assert_close(read_records(view, slots), values, rtol=2**-3, atol=2**-9)


def test_scales_lie_behind_the_data_of_their_page():
    view = record_view(cache(SCALED_FP8), 8, SCALED_FP8)
    write_records(view, torch.tensor([10]), torch.full((1, 512), 448.0))
    page, offset = 1, 2
    assert view.pages[page, offset * 576 : offset * 576 + 448].tolist() == [0x7E] * 448
    assert view.pages[page, 8 * 576 + offset * 8 : 8 * 576 + offset * 8 + 8].tolist() == [127] * 7 + [0]


def test_scales_are_powers_of_two_and_255_is_nan():
    view = record_view(cache(SCALED_FP8), 8, SCALED_FP8)
    write_records(view, torch.tensor([10]), torch.full((1, 512), 448.0))
    view.pages[1, 8 * 576 + 2 * 8 : 8 * 576 + 2 * 8 + 7] = torch.tensor([127, 130, 124, 255, 1, 0, 127]).to(torch.uint8)
    groups = read_records(view, torch.tensor([10]))[0].view(8, 64)
    wanted = [448.0, 448.0 * 8, 448.0 / 8, float("nan"), 448.0 * 2.0**-126, 448.0 * 2.0**-127, 448.0, 448.0]
    torch.testing.assert_close(groups, torch.tensor(wanted)[:, None].expand(8, 64), rtol=0, atol=0, equal_nan=True)


def test_page_stride_smaller_than_a_page():
    storage = torch.zeros(4096 * 4, dtype=torch.uint8)
    kv = storage.as_strided((4, 8, 512), (8 * 512 - 512, 512, 1))
    message = refusal(kv, 8, PLAIN_FP8)
    assert "overlap" in message
    assert "3584 bytes apart" in message
    assert "8 x 512 = 4096" in message


def test_expanded_pages():
    assert "overlap" in refusal(torch.zeros(1, 8, 512, dtype=torch.uint8).expand(4, 8, 512), 8, PLAIN_FP8)


@pytest.mark.parametrize("stride", [16, 8, 0])
def test_one_page_needs_no_page_stride(stride):
    kv = torch.zeros(8 * 512, dtype=torch.uint8).as_strided((1, 8, 512), (stride, 512, 1))
    assert record_view(kv, 8, PLAIN_FP8).num_slots == 8


def test_one_record_needs_no_record_stride():
    kv = torch.zeros(4, 2, 512, dtype=torch.uint8)[:, :1]
    assert record_view(kv.as_strided(kv.shape, (1024, 7, 1)), 1, PLAIN_FP8).page_stride_bytes == 1024


def test_record_stride():
    kv = torch.zeros(4, 8, 528, dtype=torch.uint8)[:, :, :512]
    assert "528 bytes apart, wanted 512" in refusal(kv, 8, PLAIN_FP8)


@pytest.mark.parametrize(
    ("kv", "block", "layout", "reason"),
    [
        (torch.zeros(4, 8, 512), 8, PLAIN_FP8, "dtype is torch.float32"),
        (torch.zeros(4, 8, 512, dtype=torch.bfloat16), 8, PLAIN_FP8, "dtype is torch.bfloat16"),
        (torch.zeros(4, 8, 576, dtype=torch.uint8), 8, SCALED_FP8, "576 bytes, wanted 584"),
        (torch.zeros(4, 8, 512, dtype=torch.uint8), 16, PLAIN_FP8, "have 8 records, wanted block = 16"),
        (torch.zeros(4, 6, 512, dtype=torch.uint8), 6, PLAIN_FP8, "power of two"),
        (torch.zeros(32, 512, dtype=torch.uint8), 8, PLAIN_FP8, "2 dimensions"),
        (torch.zeros(4, 512, 8, dtype=torch.uint8).transpose(1, 2), 8, PLAIN_FP8, "lie 8 apart"),
    ],
)
def test_shape(kv, block, layout, reason):
    assert reason in refusal(kv, block, layout)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"kv": None}, ["kv is a NoneType"]),
        ({"kv": torch.zeros(4, 8, 512, dtype=torch.uint8).to_sparse()}, ["wanted a dense tensor"]),
        ({"block": 8.0}, ["block is 8.0, wanted an integer"]),
        ({"block": 0}, ["block is 0, wanted an integer from 1"]),
        ({"block": -8}, ["block is -8"]),
        ({"block": True}, ["block is True"]),
        ({"layout": "plain_fp8"}, ["layout is 'plain_fp8', wanted a RecordLayout"]),
        ({"kv": [], "block": None, "layout": None}, ["kv is a list", "block is None", "layout is None"]),
    ],
)
def test_what_is_no_cache(change, reasons):
    good = {"kv": torch.zeros(4, 8, 512, dtype=torch.uint8), "block": 8, "layout": PLAIN_FP8}
    record_view(**good)
    message = refusal(**(good | change))
    for reason in reasons:
        assert reason in message


def test_all_reasons_at_once():
    message = refusal(torch.zeros(1, 6, 100).expand(3, 6, 100), 6, BF16, offset_bits=16)
    for reason in (
        "dtype",
        "power of two",
        "400 bytes, wanted 1024",
        "400 bytes apart",
        "overlap",
        "ends at byte 6144 of a storage of 2400",
        "wanted 32 or 64",
    ):
        assert reason in message


def test_where_the_bytes_are_is_told_beside_what_they_are():
    """A wrong description does not hide that the bytes lie wrong too."""
    storage = torch.zeros(1 << 16, dtype=torch.int8)
    kv = storage.as_strided((2, 8, 512), (8 * 512 + 8, 512, 1), 8)
    message = refusal(kv, 8, PLAIN_FP8)
    for reason in ("dtype is torch.int8", "that is 8 modulo 16", "wanted a multiple of 16"):
        assert reason in message
    far = far_apart(3, 1 << 30)
    message = refusal(far, 16, PLAIN_FP8, offset_bits=32)
    for reason in ("have 8 records, wanted block = 16", "32-bit offsets", "ends at byte"):
        assert reason in message


def test_bounds():
    kv = cache(PLAIN_FP8, dtype=torch.uint8)
    record_view(kv, 8, PLAIN_FP8)
    kv.untyped_storage().resize_(4 * 4096 - 1)
    assert "ends at byte 16384 of a storage of 16383" in refusal(kv, 8, PLAIN_FP8)
    kv = cache(PLAIN_FP8, dtype=torch.uint8, offset=48)
    kv.untyped_storage().resize_(4 * 4096 + 47)
    assert "ends at byte 16432 of a storage of 16431" in refusal(kv, 8, PLAIN_FP8)


@pytest.mark.parametrize("offset", [1, 8])
def test_alignment_of_the_first_page(offset):
    assert f"address that is {offset} modulo 16" in refusal(
        cache(PLAIN_FP8, dtype=torch.uint8, offset=offset), 8, PLAIN_FP8
    )


def test_a_cache_that_is_trained():
    kv = cache(BF16).requires_grad_()
    assert "it requires grad, and there is no backward" in refusal(kv, 8, BF16)
    with torch.no_grad():
        assert not record_view(kv, 8, BF16).pages.requires_grad


def test_alignment_of_the_other_pages():
    assert "wanted a multiple of 16" in refusal(cache(PLAIN_FP8, gap=8, dtype=torch.uint8), 8, PLAIN_FP8)


def far_apart(pages, stride):
    """Pages over an address range that is reserved, never touched."""
    storage = torch.empty((pages - 1) * stride + 8 * 512, dtype=torch.uint8, device="meta")
    return storage.as_strided((pages, 8, 512), (stride, 512, 1))


def test_32_bit_offsets():
    kv = far_apart(3, 1 << 30)
    assert "offset 2147487743" in refusal(kv, 8, PLAIN_FP8, offset_bits=32)
    record_view(kv, 8, PLAIN_FP8, offset_bits=64)
    record_view(far_apart(2, (1 << 31) - 4096), 8, PLAIN_FP8, offset_bits=32)


def test_unknown_offset_width():
    assert "wanted 32 or 64" in refusal(cache(PLAIN_FP8), 8, PLAIN_FP8, offset_bits=16)


def test_slots_fit_an_int32():
    assert "at most 2147483647" in refusal(far_apart(1 << 28, 4096), 8, PLAIN_FP8)
    record_view(far_apart((1 << 28) - 1, 4096), 8, PLAIN_FP8)


def test_a_block_of_numpy_is_a_number_too():
    assert type(record_view(cache(PLAIN_FP8), np.int64(8), PLAIN_FP8).block) is int


def test_empty_cache():
    assert record_view(torch.zeros(0, 8, 512, dtype=torch.uint8), 8, PLAIN_FP8).num_slots == 0
