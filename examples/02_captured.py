# SPDX-License-Identifier: Apache-2.0
"""A captured collective: four ranks on one GPU in one process, a CUDA graph with a gather and a sum, replayed.

python examples/02_captured.py
"""

import sys

import torch

import nvcomm

WORLD_SIZE = 4


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: a CUDA graph needs a GPU, and this machine has none")
        sys.exit(0)
    with nvcomm.virtual_world(WORLD_SIZE, "cuda") as world:
        step = torch.zeros(1, device="cuda")
        xs = [torch.zeros(6, 5120, device="cuda", dtype=torch.bfloat16) for _ in range(WORLD_SIZE)]
        gathered = world.all_gather(xs)
        sums = world.all_reduce(xs)
        # Outputs exist and kernels are loaded: from here on nothing allocates, and nothing is a host argument.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.add_(1)
            for rank, x in enumerate(xs):
                x.copy_((step + rank).expand_as(x))
            world.all_gather(xs, gathered)
            world.all_reduce(xs, sums)
        for _ in range(100):
            graph.replay()
        world[0].check()  # waits for nothing; raises what the device recorded
        torch.cuda.synchronize()
        assert [int(row[0, 0]) for row in gathered[0]] == [100 + rank for rank in range(WORLD_SIZE)]
        assert int(sums[3][0, 0]) == 100 * WORLD_SIZE + sum(range(WORLD_SIZE))
        print(f"100 replays of {WORLD_SIZE} ranks: gathered {tuple(gathered[0].shape)}, every rank has the same sum")


if __name__ == "__main__":
    main()
