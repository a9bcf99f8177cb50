# SPDX-License-Identifier: Apache-2.0
"""One process per rank: gather, reduce and scatter, between GPUs or, where there are none, between CPU processes.

torchrun --nproc-per-node 4 examples/01_all_gather.py
mpiexec -n 4 python examples/01_all_gather.py
"""

import torch

import nvcomm
from nvcomm.launch import launched


def main() -> None:
    with launched() as (group, device), nvcomm.Communicator(group, device) as comm:
        # Any dtype, any bits, up to max_bytes (4 MiB). Every rank's tensor has the same shape.
        x = torch.full((6, 8), float(comm.rank), device=device, dtype=torch.bfloat16)
        gathered = comm.all_gather(x)  # (world_size, 6, 8)
        total = comm.all_reduce(x)  # (6, 8), the same bits on every rank
        mine = comm.reduce_scatter(x)  # this rank's rows of the sum

        expected = sum(range(comm.world_size))
        assert [int(row[0, 0]) for row in gathered] == list(range(comm.world_size))
        assert bool((total == expected).all())
        assert bool((mine == expected).all())
        comm.check()  # on a GPU errors are recorded on the device; this raises them
        if comm.rank == 0:
            print(f"{comm.world_size} ranks on {device.type}: gathered {tuple(gathered.shape)}, sum {expected}")


if __name__ == "__main__":
    main()
