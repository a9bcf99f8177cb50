# SPDX-License-Identifier: Apache-2.0
"""What a sublayer boundary of a stress run takes and gives, on the GPU."""

from __future__ import annotations

import torch

from stress.sum_oracle import STREAMS

HIDDEN = 5120
MAX_ROWS = 384


class BoundaryTensors:
    """Tensors of one boundary, of `max_rows` rows, on `device`."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self.x, self.h = zeros(HIDDEN), zeros(HIDDEN)
        self.residual, self.new_residual = zeros(STREAMS, HIDDEN), zeros(STREAMS, HIDDEN)
        self.post, self.pre = zeros(STREAMS, dtype=torch.float32), zeros(STREAMS, dtype=torch.float32)
        self.comb = zeros(STREAMS, STREAMS, dtype=torch.float32)
