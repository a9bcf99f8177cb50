# SPDX-License-Identifier: Apache-2.0
"""What one rank tells the others in an exchange: bounded JSON that says where in the program the rank is."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from nvcomm.errors import CapabilityError, GroupError, UsageError
from nvcomm.group.contract import JSON, MAX_ANSWER_BYTES

MAX_WORLD_SIZE = 1 << 16  # an answer that claims more is no answer


def encode(envelope: dict[str, JSON]) -> str:
    """The envelope as text. Raises UsageError where it is no JSON, or too large."""
    try:
        text = json.dumps(envelope, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"an answer has to be JSON: {error}") from error
    if len(text) > MAX_ANSWER_BYTES:
        raise UsageError(
            f"an answer has {len(text)} bytes; wanted at most {MAX_ANSWER_BYTES}: send tensors by a collective instead."
        )
    return text


def decode(data: bytes, rank: int) -> dict[str, Any]:
    """The envelope that `rank` wrote. Raises GroupError where it is none: it is read, never trusted."""
    envelope: Any = None
    if len(data) <= MAX_ANSWER_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            envelope = json.loads(data)
    fields = envelope if isinstance(envelope, dict) else {}
    tag, world_size = fields.get("tag"), fields.get("world_size")
    sound = isinstance(tag, str) and isinstance(world_size, int) and 0 < world_size <= MAX_WORLD_SIZE
    if not sound or not fields.keys() & {"value", "error"}:
        raise GroupError(
            f"rank {rank} answered {data[:64]!r} ({len(data)} bytes), which is none of our envelopes: see whether "
            "another version of nvcomm, or another program, writes to this store."
        )
    return fields


def check_place(envelope: dict[str, Any], rank: int, tag: str, own_rank: int) -> None:
    """Raises GroupError unless `rank` is at the same place of the program, and did not give up there."""
    if "error" in envelope:
        raise GroupError(f"rank {rank} gave up at {envelope['tag']!r}: {envelope['error']}")
    if envelope["tag"] != tag:
        raise GroupError(
            f"rank {own_rank} is at {tag!r} while rank {rank} is at {envelope['tag']!r}: all ranks make the same calls "
            f"in the same order."
        )


def other_worlds(told: dict[int, Any]) -> CapabilityError:
    """The error for ranks that were told of different numbers of ranks: rank -> number."""
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in told.items())
    reasons = {rank: [f"world_size={value}"] for rank, value in told.items()}
    return CapabilityError(f"ranks disagree on world_size: {listed}. Start every rank with the same number.", reasons)
