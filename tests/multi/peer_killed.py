# SPDX-License-Identifier: Apache-2.0
"""One GPU per process, and the last rank is killed in mid-collective: what the others see, and what they can still do.

    python tests/multi/peer_killed.py replaying|waiting

`replaying`: every rank replays graphs of back-to-back gathers when the kill comes. `waiting`: the others hold back, so
that the victim's kernel waits for them on its GPU, its own words sent. Starts its ranks itself: a launcher would end
the others too. Not for ranks that share a GPU: under MPS the end of one client is the end of all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import nvcomm
from nvcomm.group import StoreGroup
from tests.kernel.worlds import coded

TIMEOUT_S = 2.0
ROOT = Path(__file__).parents[2]
WORDS = 16_384


def gathers(comm: nvcomm.Communicator) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A graph of 50 gathers, and what it works on."""
    x = coded(comm.rank, 0, WORDS)
    out = torch.zeros((comm.world_size, WORDS), dtype=torch.int32, device=comm.device)
    comm.all_gather(x, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(50):
            comm.all_gather(x, out)
    return graph, (x, out)


def right_again(comm: nvcomm.Communicator) -> bool:
    """Gathers of a new communicator, compared."""
    for call in range(64):
        wants = [coded(rank, call, WORDS) for rank in range(comm.world_size)]
        if not torch.equal(comm.all_gather(wants[comm.rank]), torch.stack(wants)):
            return False
    torch.cuda.synchronize()
    comm.check()
    return True


def main_rank(rank: int, world_size: int, folder: Path, scene: str) -> None:
    """One rank; the last is the victim."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), world_size)
    comm = nvcomm.Communicator(StoreGroup(store, rank, world_size, "killed"), device, timeout_s=TIMEOUT_S)
    graph, tensors = gathers(comm)
    victim = rank == world_size - 1
    (folder / f"ready{rank}").touch()
    if scene == "waiting" and not victim:
        while not (folder / "killed").exists():
            time.sleep(0.001)
    error: nvcomm.PeerTimeoutError | None = None
    while error is None:
        graph.replay()
        torch.cuda.synchronize()
        try:
            comm.check()
        except nvcomm.PeerTimeoutError as timeout:
            error = timeout
    seen = {"told_at": time.monotonic(), "src": error.src_rank, "root": error.root_rank, "waited_s": error.waited_s}
    square = torch.eye(64, device=device) * 3
    usable = bool(torch.equal(square @ square, torch.eye(64, device=device) * 9))
    refused = _refused(comm)
    reset = "nothing"
    try:
        comm.reset()
    except nvcomm.NvcommError as failed:
        reset = type(failed).__name__
    del graph, tensors
    comm.close()
    others = StoreGroup(dist.PrefixStore("survivors", store), rank, world_size - 1, "survivors")
    with nvcomm.Communicator(others, device, timeout_s=20.0) as again:
        right = right_again(again)
        others.barrier("end", 60.0)
    facts = seen | {"usable": usable, "refused": refused, "reset": reset, "right": right}
    (folder / f"facts{rank}").write_text(json.dumps(facts))


def _refused(comm: nvcomm.Communicator) -> bool:
    """Whether a broken communicator says so at the next call."""
    try:
        comm.all_gather(coded(comm.rank, 0, 4))
    except nvcomm.PeerTimeoutError:
        return True
    return False


def main(scene: str) -> None:
    """Starts the ranks, kills the last, and judges what the others wrote down."""
    world_size = torch.cuda.device_count()
    if world_size < 2:
        raise SystemExit(f"needs a GPU for each of two ranks or more; there are {world_size}")
    with tempfile.TemporaryDirectory(prefix="nv") as name:
        folder = Path(name)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, scene, str(rank), str(world_size), name],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world_size)
        ]
        try:
            deadline = time.monotonic() + 90
            while not all((folder / f"ready{rank}").exists() for rank in range(world_size)):
                if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                    raise SystemExit("a rank did not get ready")
                time.sleep(0.01)
            time.sleep(0.3)
            ranks[-1].send_signal(signal.SIGKILL)
            ranks[-1].wait()
            killed_at = time.monotonic()
            (folder / "killed").touch()
            for rank, process in enumerate(ranks[:-1]):
                if process.wait(60) != 0:
                    raise SystemExit(f"rank {rank} ended with {process.returncode}")
                judge(rank, world_size, json.loads((folder / f"facts{rank}").read_text()), killed_at)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    sys.stdout.write(f"{scene}: all survivors went on\n")


def judge(rank: int, world_size: int, facts: dict[str, object], killed_at: float) -> None:
    after_s = float(str(facts["told_at"])) - killed_at
    sys.stdout.write(f"rank {rank}: told {after_s:.2f} s after the kill; {facts}\n")
    expected = {"usable": True, "refused": True, "reset": "GroupError", "right": True, "root": world_size - 1}
    wrong = {name: facts[name] for name, value in expected.items() if facts[name] != value}
    if wrong or not after_s <= TIMEOUT_S + 1:
        raise SystemExit(f"rank {rank}: wanted {expected} within {TIMEOUT_S + 1} s, got {wrong}, {after_s:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        main_rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[1])
