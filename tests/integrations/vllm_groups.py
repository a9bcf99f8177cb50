# SPDX-License-Identifier: Apache-2.0
"""One rank of vLLM's own tensor-parallel group on the CPU, with the plugin: its operations, and who carries them.

torchrun --nproc-per-node 2 tests/integrations/vllm_groups.py      (started by test_vllm.py)
"""

from __future__ import annotations

import os
import sys

import torch

os.environ["VLLM_DIST_IDENT"] = os.environ["MASTER_PORT"]
os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_HOST_IP="127.0.0.1")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.plugins import load_general_plugins

from nvcomm.errors import UsageError
from nvcomm.integrations.vllm_allreduce import VllmAllreduce

MAX_BYTES = 1 << 16


def operations(tp, rank, world_size):
    """Each operation in each dimension, by method and by `torch.ops.vllm`: the result, and one call of nvcomm each."""
    xs = [torch.arange(24, dtype=torch.bfloat16).reshape(2, 4, 3) + 10 * r for r in range(world_size)]
    x, total = xs[rank], sum(xs)
    ops, name = torch.ops.vllm, tp.unique_name
    cases = [("all_reduce", tp.all_reduce(x), ops.all_reduce(x, name), total)]
    for dim in (0, 1, -1):
        gathered = tp.all_gather(x, dim), ops.all_gather(x, dim, world_size, name)
        cases.append((f"all_gather along {dim}", *gathered, torch.cat(xs, dim)))
    for dim in (0, 1):
        scattered = tp.reduce_scatter(x, dim), ops.reduce_scatter(x, dim, world_size, name)
        cases.append((f"reduce_scatter along {dim}", *scattered, total.chunk(world_size, dim)[rank]))
    for what, by_method, by_operator, want in cases:
        for out in (by_method, by_operator):
            assert torch.equal(out, want), f"rank {rank}: {what}: {out}, wanted {want}"
            assert out.is_contiguous(), what
    assert tp.device_communicator.nvcomm.comm.stats().calls == 2 * len(cases)
    assert torch.equal(x, torch.arange(24, dtype=torch.bfloat16).reshape(2, 4, 3) + 10 * rank), "an input was changed"


def left_to_vllm(tp, rank, world_size):
    """Too large, or of a dtype without a sum here: vLLM carries it, with the right result."""
    calls = tp.device_communicator.nvcomm.comm.stats().calls
    big = torch.full((MAX_BYTES // 2 + 8,), float(rank + 1), dtype=torch.bfloat16)
    assert (tp.all_reduce(big.clone()) == sum(range(1, world_size + 1))).all()
    assert torch.equal(tp.all_gather(big, 0)[:: big.numel()], torch.arange(1, world_size + 1, dtype=torch.bfloat16))
    assert tp.device_communicator.nvcomm.comm.stats().calls == calls


def main():
    load_general_plugins()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = VllmConfig(device_config=DeviceConfig("cpu"), additional_config={"nvcomm": {"max_bytes": MAX_BYTES}})
    with set_current_vllm_config(config):
        assert VllmAllreduce.options()["max_bytes"] == MAX_BYTES
        parallel_state.init_distributed_environment(world_size, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tp = parallel_state.get_tp_group()
    operations(tp, rank, world_size)
    left_to_vllm(tp, rank, world_size)
    for wrong, says in (({"max_size": 1}, "max_size"), (True, "an object of options"), (None, "is None")):
        config.additional_config["nvcomm"] = wrong
        with set_current_vllm_config(config):
            try:
                seen = f"options were taken: {VllmAllreduce.options()}"
            except UsageError as error:
                seen = str(error)
        assert says in seen, seen
    ours = tp.device_communicator.nvcomm
    parallel_state.destroy_model_parallel()
    assert ours.disabled
    parallel_state.destroy_distributed_environment()
    sys.stdout.write(f"rank {rank} of {world_size}: all steps passed\n")


if __name__ == "__main__":
    main()
