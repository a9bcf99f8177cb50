# SPDX-License-Identifier: Apache-2.0
"""Who is measured: a name for the table, and the calls that are checked and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Contender:
    """Who makes the call `(x, out)`.

    Attributes:
        name: for the table.
        call: the collective, out of place: it is checked.
        timed: what is timed; the same, but for contenders that work in place or from memory of their own.
        load: called with `x` before the timing, if `timed` does not read it from there.
        leaves_result: whether `out` holds the result after timed calls.
    """

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], object]
    timed: Callable[[torch.Tensor, torch.Tensor], object]
    load: Callable[[torch.Tensor], None] | None = None
    leaves_result: bool = True
