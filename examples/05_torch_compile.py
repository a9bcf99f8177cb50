# SPDX-License-Identifier: Apache-2.0
"""A collective inside torch.compile: traced in one graph with what is around it, and kept where it stands.

torchrun --nproc-per-node 2 examples/05_torch_compile.py
mpiexec -n 2 python examples/05_torch_compile.py
"""

import torch

import nvcomm
from nvcomm.integrations import torch_ops
from nvcomm.launch import launched


def main() -> None:
    with launched() as (group, device), nvcomm.Communicator(group, device) as comm:
        ops = torch_ops.register(comm)
        weight = torch.eye(8, device=device) * (comm.rank + 1)

        # A row-parallel linear layer. On a GPU leave the backend out, for kernels of the inductor.
        @torch.compile(fullgraph=True, backend="aot_eager")
        def layer(x: torch.Tensor) -> torch.Tensor:
            return ops.all_reduce(x @ weight).relu()

        y = layer(torch.ones(4, 8, device=device))
        expected = sum(range(1, comm.world_size + 1))
        assert bool((y == expected).all())
        comm.check()
        if comm.rank == 0:
            print(f"compiled, {comm.world_size} ranks: every value is {expected}")


if __name__ == "__main__":
    main()
