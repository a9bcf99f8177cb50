# SPDX-License-Identifier: Apache-2.0
"""Errors and reasons as text that fits an answer: one line each, of bounded length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvcomm.errors import NvcommError

if TYPE_CHECKING:
    from nvcomm.group import JSON

# An answer has to fit `nvcomm.group.MAX_ANSWER_BYTES`, escapes included.
MAX_REASON_CHARS = 500
_REASONS_BYTES = 24 << 10


def fitting(reasons: Sequence[str]) -> list[JSON]:
    """As many reasons as fit, and how many did not."""
    told: list[JSON] = []
    left = _REASONS_BYTES
    for reason in reasons:
        left -= len(json.dumps(reason))
        if left < 0:
            return [*told, f"and {len(reasons) - len(told)} more reasons"]
        told.append(reason)
    return told


def described(error: BaseException) -> str:
    """What `error` says, with its type unless it is ours; whatever is broken about it."""
    try:
        text = one_line(str(error))
    except Exception:  # its __str__ is broken: its type has to do
        text = ""
    if isinstance(error, NvcommError) and text:
        return clipped(text, MAX_REASON_CHARS)
    return clipped(f"{type(error).__name__}: {text}" if text else type(error).__name__, MAX_REASON_CHARS)


def one_line(text: str) -> str:
    """`text` as one line of a reason's length."""
    return clipped(" ".join(text.split()), MAX_REASON_CHARS)


def clipped(text: str, limit: int) -> str:
    """At most `limit` characters of `text`."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def digest(text: str) -> str:
    """What stands for a text that is too long to tell."""
    return "sha256 " + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
