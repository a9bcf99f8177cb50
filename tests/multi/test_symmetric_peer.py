# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory for real: processes on one GPU or several map each other's mailboxes and store into them.

Run by pytest, which starts the ranks; by hand:

torchrun --nproc-per-node 4 tests/multi/test_symmetric_peer.py
mpiexec -n 4 python tests/multi/test_symmetric_peer.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE = 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_store_into_each_others_memory(world_size, tmp_path):
    # A short path: sockets lie in it, and theirs are at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="nv") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        done = subprocess.run(
            [*command, __file__],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("all steps passed") == world_size
        assert not [entry for entry in os.listdir(folder) if entry.startswith("nvcomm-")], "a meeting folder is left"  # noqa: PTH208


def main() -> None:
    """One rank: each step is checked by every rank."""
    import torch

    from nvcomm import driver
    from nvcomm.errors import CapabilityError
    from nvcomm.group import as_group
    from nvcomm.memory.symmetric import SymmetricMemory

    group = as_group(None)
    rank, world_size = group.rank, group.world_size
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    variables = ("TMPDIR", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    before = [os.environ.get(name) for name in variables]
    group.barrier("every rank has its CUDA context", 60)
    free_before = torch.cuda.mem_get_info()[0]

    def check_stores(memory: SymmetricMemory, salt: int) -> None:
        row_words = memory.size_bytes // 4 // world_size
        memory.local().fill_(-1)
        torch.cuda.synchronize()
        group.barrier("filled", 60)
        source = torch.arange(row_words, dtype=torch.int32, device=device) + (salt + rank) * 1_000_000
        torch.cuda.synchronize()
        for peer in range(world_size):
            row = memory.peer_ptrs[peer] + rank * row_words * 4
            driver.call("cuMemcpyDtoD", row, source.data_ptr(), row_words * 4)
        torch.cuda.synchronize()
        group.barrier("stored", 60)
        rows = memory.local()[: row_words * world_size].view(world_size, row_words).cpu()
        for peer in range(world_size):
            expected = torch.arange(row_words, dtype=torch.int32) + (salt + peer) * 1_000_000
            assert torch.equal(rows[peer], expected), f"rank {rank} sees a wrong row {peer}"
        group.barrier("checked", 60)

    for salt, size in enumerate((SIZE, 48, 37 * 16, 16 << 20)):
        with SymmetricMemory(group, device, size, multicast=False, timeout_s=60) as memory:
            assert (memory.rank, memory.world_size, memory.size_bytes) == (rank, world_size, size)
            assert memory.multicast_ptr == 0
            check_stores(memory, salt)

    # Two at once, then a refusal, then another: a failed attempt leaves the ranks in step.
    first = SymmetricMemory(group, device, SIZE, multicast=False, timeout_s=60)
    second = SymmetricMemory(group, device, SIZE, multicast=False, timeout_s=60)
    assert set(first.peer_ptrs).isdisjoint(second.peer_ptrs)
    check_stores(first, 10)
    check_stores(second, 20)
    with pytest.raises(CapabilityError, match="size of a mailbox"):
        SymmetricMemory(group, device, SIZE + 16 * rank, multicast=False, timeout_s=60)
    check_stores(first, 30)
    # Closing is local: rank 0 closes while the others still look at its memory through their own mappings.
    if rank == 0:
        second.close()
    group.barrier("rank 0 closed", 60)
    if rank != 0:
        words = torch.empty(4, dtype=torch.int32, device=device)
        driver.call("cuMemcpyDtoD", words.data_ptr(), second.peer_ptrs[0], 16)
        assert words.cpu().tolist() == [20_000_000 + i for i in range(4)]
    group.barrier("looked", 60)
    second.close()
    first.close()
    torch.cuda.empty_cache()
    group.barrier("closed", 60)
    assert [os.environ.get(name) for name in variables] == before
    lost = free_before - torch.cuda.mem_get_info()[0]
    # Everything of all ranks on this GPU is given back, but for PyTorch's own small blocks.
    assert lost < 16 << 20, f"{lost} bytes were not given back"
    group.barrier("end", 60)
    sys.stdout.write(f"rank {rank} of {world_size} on {device}: all steps passed; {lost} bytes not given back\n")


if __name__ == "__main__":
    main()
