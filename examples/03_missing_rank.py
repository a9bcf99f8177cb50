# SPDX-License-Identifier: Apache-2.0
"""A rank that does not come: the others are told which one, in bounded time, and go on together afterwards.

torchrun --nproc-per-node 3 examples/03_missing_rank.py
mpiexec -n 3 python examples/03_missing_rank.py
"""

import torch

import nvcomm
from nvcomm.launch import launched


def main() -> None:
    with launched() as (group, device), nvcomm.Communicator(group, device, timeout_s=5.0) as comm:
        x = torch.arange(4, device=device, dtype=torch.int32) + 100 * comm.rank
        comm.all_gather(x)
        comm.check()
        group.barrier("all have gathered once", 60)

        late = comm.world_size - 1
        if comm.rank != late:
            try:
                comm.all_gather(x)  # the late rank does not make this call
                if device.type == "cuda":
                    torch.cuda.synchronize()
                comm.check()
                raise RuntimeError("nobody noticed")
            except nvcomm.PeerTimeoutError as error:
                print(f"rank {comm.rank} was told after {error.waited_s:.1f} s: rank {error.root_rank} did not come")

        comm.reset()  # collective: brings every rank back to one place
        assert comm.all_gather(x)[:, 0].tolist() == [100 * rank for rank in range(comm.world_size)]
        comm.check()
        if comm.rank == 0:
            print(f"after reset() all {comm.world_size} ranks gather again")


if __name__ == "__main__":
    main()
