# SPDX-License-Identifier: Apache-2.0
"""What a rank says it is calling (docs/mailbox.md R11), in the 8 words of a header.

Each word carries 16 bits under the tag of the escape records, so that no field can look like EMPTY.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nvcomm.host.words import Words
from nvcomm.mailbox import HEADER_WORDS, RECORD_BITS, RECORD_TAG

OPERATIONS = (
    "all_gather", "all_reduce ll", "all_reduce two_shot", "reduce_scatter", "all_reduce_mhc ll",
    "all_reduce_mhc two_shot",
)  # fmt: skip
# By name and in this order, whatever torch calls them by: the index travels.
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
)  # fmt: skip
_MASK = (1 << RECORD_BITS) - 1
MAX_TAG = _MASK


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call.

    Attributes:
        operation: the collective.
        dtype: element type by torch's name; types outside `DTYPES` travel as "other".
        num_bytes: bytes that the rank contributes, below 2**48.
        generation: the rank's generation.
        tag: the caller's own mark, 0 to `MAX_TAG`.
    """

    operation: str
    dtype: str
    num_bytes: int
    generation: int
    tag: int

    def __str__(self) -> str:
        return (
            f"{self.operation} of {self.num_bytes} bytes of {self.dtype}, tag {self.tag}, generation {self.generation}"
        )


def encode(call: Call) -> Words:
    """(HEADER_WORDS,) words to publish."""
    dtype = DTYPES.index(call.dtype) if call.dtype in DTYPES else _MASK
    size, generation = call.num_bytes, call.generation
    fields = [
        OPERATIONS.index(call.operation), dtype, size & _MASK, size >> 16 & _MASK, size >> 32,
        generation & _MASK, generation >> 16, call.tag,
    ]  # fmt: skip
    return np.array(fields, np.uint32) | np.uint32(RECORD_TAG)


def decode(words: Words) -> Call:
    """What `encode` was given. `words`: (HEADER_WORDS,), none of them EMPTY."""
    fields = [int(word) & _MASK for word in words[:HEADER_WORDS]]
    operation = OPERATIONS[fields[0]] if fields[0] < len(OPERATIONS) else f"operation {fields[0]}"
    dtype = DTYPES[fields[1]] if fields[1] < len(DTYPES) else "other"
    num_bytes = fields[2] | fields[3] << 16 | fields[4] << 32
    return Call(operation, dtype, num_bytes, fields[5] | fields[6] << 16, fields[7])
