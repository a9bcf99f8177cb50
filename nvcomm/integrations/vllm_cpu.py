# SPDX-License-Identifier: Apache-2.0
"""vLLM's communicator of CPU ranks, with the collectives of the tensor-parallel group going through nvcomm."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from nvcomm.integrations.vllm_allreduce import VllmAllreduce


class NvcommCpuCommunicator(CpuCommunicator):  # type: ignore[misc]
    """`CpuCommunicator` whose all_reduce, all_gather and reduce_scatter use nvcomm where it takes the tensor.

    What it does not take (another dtype, too many bytes), other groups and other operations stay with vLLM.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=use_all2all)
        self.nvcomm: VllmAllreduce | None = None
        # The name up to the colon: "tp", as vLLM itself asks on GPUs.
        if unique_name.split(":")[0] == "tp" and self.world_size > 1:
            self.nvcomm = VllmAllreduce(cpu_group, "cpu")

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in a new tensor; in `input_` where vLLM does it."""
        out = None if self.nvcomm is None else self.nvcomm.custom_all_reduce(input_)
        return super().all_reduce(input_) if out is None else out

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' inputs, one after the other in dimension `dim`."""
        out = None if self.nvcomm is None else self.nvcomm.custom_all_gather(input_.contiguous())
        if out is None:
            return super().all_gather(input_, dim)
        dim %= input_.dim()
        # They lie one after the other in dimension 0. For another one the ranks move there, and merge with it.
        return out.view(self.world_size, *input_.shape).movedim(0, dim).flatten(dim, dim + 1) if dim else out

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part of the sum over the ranks, split in dimension `dim`."""
        rows = input_.movedim(dim, 0).contiguous()
        out = None if self.nvcomm is None else self.nvcomm.custom_reduce_scatter(rows)
        return super().reduce_scatter(input_, dim) if out is None else out.movedim(0, dim).contiguous()

    def destroy(self) -> None:
        """Closes this rank's end, then does what vLLM does."""
        if self.nvcomm is not None:
            self.nvcomm.close()
        super().destroy()
