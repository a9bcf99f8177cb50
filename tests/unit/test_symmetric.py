# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory without a GPU: ranks are processes, and PyTorch and the driver are stood in for.

Each of their calls is made to fail once, or never to return. Whatever happens on one rank, all ranks learn it, none
waits past its deadline, and no folder, variable or memory is left.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from nvcomm.errors import CapabilityError, GroupError, UsageError  # noqa: E402
from nvcomm.group import StoreGroup, local_groups  # noqa: E402
from nvcomm.memory import Memory  # noqa: E402
from nvcomm.memory.meeting_folder import MeetingFolder  # noqa: E402
from nvcomm.memory.symmetric import SymmetricMemory  # noqa: E402
from nvcomm.memory.torch_symmetric import TorchSymmetricMemory  # noqa: E402

SIZE = 4096
LONG_S = 40.0  # that nobody waits for, however busy the machine
SHORT_S = 3.0  # where somebody is waited for in vain: what a busy machine may take for the steps before
GPU = torch.device("cuda:0")
VARIABLES = ("TMPDIR", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


@dataclass
class FakeMapping:
    buffer_ptrs: list[int]
    multicast_ptr: int


class FakeTorch(TorchSymmetricMemory):
    """Stands in for PyTorch. `fault` is (call, an exception to raise or a function to apply to the real result)."""

    def __init__(self, group, *, shared_gpu=False, multicast=False, fault=None):
        self.group, self.shared_gpu, self.multicast, self.fault = group, shared_gpu, multicast, fault
        self.allocated = None
        self.seen = {}

    def _maybe(self, call, result):
        if self.fault is None or self.fault[0] != call:
            return result()
        if isinstance(self.fault[1], Exception):
            raise type(self.fault[1])(*self.fault[1].args)  # a fresh one: it keeps its frames alive
        return self.fault[1](result())

    def device_uuid(self, device):
        return self._maybe("device_uuid", lambda: "one" if self.shared_gpu else f"gpu {self.group.rank}")

    def allocate(self, size_bytes, device):
        def real():
            tensor = torch.zeros(size_bytes, dtype=torch.uint8)
            self.allocated = weakref.ref(tensor)
            return tensor

        return self._maybe("allocate", real)

    def rendezvous(self, tensor, group, name):
        self.seen = {name: os.environ.get(name) for name in VARIABLES}
        self.seen["mode"] = oct(Path(self.seen["TMPDIR"]).stat().st_mode & 0o777)

        def real():
            store = group.child_store(name)
            store.set(str(group.rank), str(tensor.data_ptr()))
            ptrs = [int(store.get(str(rank))) for rank in range(group.world_size)]
            return FakeMapping(ptrs, 0x1000 if self.multicast else 0)

        return self._maybe("rendezvous", real)


def run_ranks(world_size, body, tmp_path):
    """Runs body(group) in one process per rank; returns what each returned, or how it died."""
    context = multiprocessing.get_context("fork")
    pipes, ranks = [], []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, world_size, body, str(tmp_path / "store"), send))
        process.start()
        send.close()
        pipes.append(receive)
        ranks.append(process)
    results = []
    for process, pipe in zip(ranks, pipes, strict=True):
        with contextlib.suppress(EOFError):
            results.append(pipe.recv() if pipe.poll(2 * LONG_S) else "no result")
        process.join(LONG_S)
        if process.is_alive():
            process.kill()
    return results


def _rank_main(rank, world_size, body, path, send):
    group = StoreGroup(dist.FileStore(path, world_size), rank, world_size, "test")
    group.barrier("every process runs", LONG_S)  # so that a short timeout bounds what is tested, not how ranks start
    send.send(body(group))
    send.close()
    os._exit(0)  # a thread that hangs in a rendezvous would be waited for


def build(group, *, timeout_s=LONG_S, **fake):
    """Builds and describes: the outcome and whatever is left behind."""
    size = fake.pop("size", SIZE)
    ask = fake.pop("ask_multicast", False)
    api = FakeTorch(group, **fake)
    before = {name: os.environ.get(name) for name in VARIABLES}
    start = time.monotonic()
    result = {"rank": group.rank}
    try:
        memory = SymmetricMemory(group, GPU, size, multicast=ask, timeout_s=timeout_s, api=api)
    except (CapabilityError, GroupError, UsageError) as error:
        result |= {"error": type(error).__name__, "text": str(error)}
        result |= {"reasons": getattr(error, "reasons", None), "missing": getattr(error, "missing", None)}
    else:
        assert isinstance(memory, Memory)
        result |= {"ptrs": len(memory.peer_ptrs), "own": memory.peer_ptrs[group.rank] == memory.local().data_ptr()}
        result |= {"multicast_ptr": memory.multicast_ptr, "world": memory.world, "size": memory.size_bytes}
        memory.close()
        memory.close()
    result["seconds"] = time.monotonic() - start
    gc.collect()
    result["leak"] = api.allocated is not None and api.allocated() is not None
    result["seen"] = api.seen
    result["variables"] = before == {name: os.environ.get(name) for name in VARIABLES}
    return result


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """Temporary folders go below here; multicast is not switched off by the surroundings.

    Not `tmp_path`, which is too long for a socket's path in a worker of pytest-xdist; but it comes first, so that
    pytest's own folders are made elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="nvcomm-") as name:
        folder = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        for name in (
            "NVCOMM_DISABLE_MULTICAST",
            "NCCL_NVLS_ENABLE",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST",
            "NVSHMEM_DISABLE_NVLS",
        ):
            monkeypatch.delenv(name, raising=False)
        yield folder


def assert_nothing_left(results, folders):
    for result in results:
        assert not result["leak"], f"rank {result['rank']} still holds its memory"
        assert result["variables"], f"rank {result['rank']} left variables changed"
    assert not list(folders.iterdir()), "a folder is left"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_maps_every_rank_and_nothing_is_left(world_size, tmp_path, folders):
    results = run_ranks(world_size, build, tmp_path)
    for result in results:
        assert result["ptrs"] == world_size
        assert result["own"]
        assert (result["world"], result["size"], result["multicast_ptr"]) == ("peer", SIZE, 0)
        assert result["seen"]["mode"] == "0o700"
    assert len({result["seen"]["TMPDIR"] for result in results}) == 1, "ranks of one host meet in one folder"
    assert_nothing_left(results, folders)


FAULTS = {
    "device_uuid raises": ("device_uuid", RuntimeError("no driver"), "no driver"),
    "allocate raises": ("allocate", torch.OutOfMemoryError("out of memory\nand more"), "out of memory"),
    "rendezvous maps too few": ("rendezvous", lambda m: FakeMapping(m.buffer_ptrs[:1], 0), "mapped 1 of 2 ranks"),
    "rendezvous maps a null": ("rendezvous", lambda m: FakeMapping([*m.buffer_ptrs[:1], 0], 0), "mapped 1 of 2 ranks"),
    "rendezvous moves": ("rendezvous", lambda m: FakeMapping([p + 16 for p in m.buffer_ptrs], 0), "not its beginning"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank_is_the_same_error_on_all(name, rank, tmp_path, folders):
    call, fault, says = FAULTS[name]

    def body(group):
        return build(group, fault=(call, fault) if group.rank == rank else None)

    results = run_ranks(2, body, tmp_path)
    assert [result["error"] for result in results] == ["CapabilityError"] * 2
    assert results[0]["text"] == results[1]["text"]
    assert list(results[0]["reasons"]) == [rank]
    assert says in results[0]["text"]
    assert max(result["seconds"] for result in results) < LONG_S, "nobody waits for a rank that has said no"
    assert_nothing_left(results, folders)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_rendezvous_raises_leaves_the_others_waiting_until_the_deadline_alone(rank, tmp_path, folders):
    """PyTorch's other ranks wait inside: they are late, the error says so and names who failed."""

    def body(group):
        return build(
            group, timeout_s=SHORT_S, fault=("rendezvous", RuntimeError("CUDA error")) if group.rank == rank else None
        )

    results = run_ranks(3, body, tmp_path)
    assert [result["error"] for result in results] == ["GroupError"] * 3
    assert len({result["text"] for result in results}) == 1
    assert f"rank {rank}: RuntimeError: CUDA error" in results[0]["text"]
    assert "have to end" in results[0]["text"]
    assert results[0]["missing"] == tuple(other for other in range(3) if other != rank)
    assert max(result["seconds"] for result in results) < LONG_S
    assert not results[rank]["leak"], "the rank whose call returned gives its memory back"
    assert not list(folders.iterdir())


def test_a_rendezvous_that_never_returns_is_an_error_on_every_rank(tmp_path, folders):
    def hang(mapping):
        threading.Event().wait()

    def body(group):
        return build(group, timeout_s=SHORT_S, fault=("rendezvous", hang) if group.rank == 1 else None)

    results = run_ranks(2, body, tmp_path)
    assert [result["error"] for result in results] == ["GroupError"] * 2
    assert results[0]["text"] == results[1]["text"]
    assert results[0]["missing"] == (1,)
    assert [result["leak"] for result in results] == [False, True], "the thread that hangs holds its rank's memory"
    assert all(result["variables"] for result in results)
    assert max(result["seconds"] for result in results) < LONG_S
    assert not list(folders.iterdir())


@pytest.mark.parametrize("at", ["device_uuid", "allocate", "rendezvous"])
def test_a_rank_that_dies_is_named_by_the_others(at, tmp_path, folders):
    def body(group):
        return build(group, timeout_s=SHORT_S, fault=(at, lambda result: os._exit(9)) if group.rank == 1 else None)

    (survivor,) = run_ranks(2, body, tmp_path)
    assert survivor["error"] == "GroupError"
    assert survivor["missing"] == (1,)
    assert survivor["seconds"] < LONG_S
    assert not list(folders.iterdir())


def test_ranks_that_want_different_sizes_get_the_same_error(tmp_path, folders):
    results = run_ranks(2, lambda group: build(group, size=SIZE * (1 + group.rank)), tmp_path)
    assert [result["error"] for result in results] == ["CapabilityError"] * 2
    assert results[0]["text"] == results[1]["text"]
    assert "[4096, 8192]" in results[0]["text"]
    assert_nothing_left(results, folders)


def test_ranks_on_one_gpu_tell_pytorch_so_for_the_time_being(tmp_path, folders):
    shared = run_ranks(2, lambda group: build(group, shared_gpu=True, ask_multicast=True), tmp_path)
    assert [result["seen"]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] for result in shared] == ["1", "1"]
    assert [result["seen"]["TORCH_SYMM_MEM_DISABLE_MULTICAST"] for result in shared] == ["1", "1"]
    (tmp_path / "apart").mkdir()
    apart = run_ranks(2, build, tmp_path / "apart")
    assert [result["seen"]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] for result in apart] == [None, None]
    assert_nothing_left(shared + apart, folders)


def test_multicast_is_used_only_if_every_rank_got_it(tmp_path, folders):
    every = run_ranks(2, lambda group: build(group, ask_multicast=True, multicast=True), tmp_path)
    assert [result["multicast_ptr"] for result in every] == [0x1000] * 2
    assert [result["seen"]["TORCH_SYMM_MEM_DISABLE_MULTICAST"] for result in every] == [None] * 2
    for part in ("one has it", "one asks"):
        (tmp_path / part).mkdir()
        some = run_ranks(
            2,
            lambda group, part=part: build(
                group,
                ask_multicast=part == "one has it" or group.rank == 0,
                multicast=part == "one asks" or group.rank == 0,
            ),
            tmp_path / part,
        )
        assert [result["multicast_ptr"] for result in some] == [0, 0], part
    assert_nothing_left(every, folders)


@pytest.mark.parametrize("variable", ["NVCOMM_DISABLE_MULTICAST=1", "NCCL_NVLS_ENABLE=0", "NVSHMEM_DISABLE_NVLS=1"])
def test_a_variable_on_one_rank_keeps_multicast_off_before_the_rendezvous_and_after(variable, tmp_path):
    def body(group):
        if group.rank == 1:
            name, value = variable.split("=")
            os.environ[name] = value
        result = build(group, ask_multicast=True, multicast=True)
        result["after"] = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
        return result

    results = run_ranks(2, body, tmp_path)
    assert [result["multicast_ptr"] for result in results] == [0, 0]
    assert [result["seen"]["TORCH_SYMM_MEM_DISABLE_MULTICAST"] for result in results] == ["1", "1"]
    assert [result["after"] for result in results] == [None, "1"]


@pytest.mark.parametrize(("device", "size"), [("cpu", SIZE), ("cuda", SIZE), ("cuda:0", 0), ("cuda:0", 24)])
def test_wrong_arguments_are_usage_errors_before_anything_is_told(device, size):
    (group,) = local_groups(1)
    with pytest.raises(UsageError, match="wanted"):
        SymmetricMemory(group, torch.device(device), size, multicast=False, timeout_s=1, api=FakeTorch(group))


def test_closed_memory_says_so_and_forgotten_memory_warns():
    (group,) = local_groups(1)
    with SymmetricMemory(group, GPU, SIZE, multicast=False, timeout_s=5, api=FakeTorch(group)) as memory:
        assert memory.local().dtype == torch.int32
    assert memory.peer_ptrs == ()
    with pytest.raises(UsageError, match="closed"):
        memory.local()
    forgotten = SymmetricMemory(group, GPU, SIZE, multicast=False, timeout_s=5, api=FakeTorch(group))
    with pytest.warns(ResourceWarning, match="not closed"):
        del forgotten
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del memory


def test_without_a_driver_the_real_calls_say_why():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (group,) = local_groups(1)
    with pytest.raises(CapabilityError, match="driver"):
        SymmetricMemory(group, GPU, SIZE, multicast=False, timeout_s=1)


@pytest.mark.parametrize("fails", [False, True])
def test_pytorch_finds_ranks_and_store_under_the_name_and_only_during_the_rendezvous(fails, monkeypatch):
    c10d = torch._C._distributed_c10d
    found = []

    class FakeSymmetricMemory:
        @staticmethod
        def rendezvous(tensor, name):
            gc.collect()  # PyTorch's registry keeps nothing alive
            process_group = c10d._resolve_process_group(name)
            process_group.get_group_store().set("key", "value")
            found.append((process_group.rank(), process_group.size()))
            if fails:
                raise RuntimeError("CUDA error")
            return "mapping"

    monkeypatch.setattr(c10d, "_SymmetricMemory", FakeSymmetricMemory)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    group = local_groups(3)[2]
    rendezvous = functools.partial(TorchSymmetricMemory().rendezvous, torch.zeros(1), group, "nvcomm/some name")
    with pytest.raises(RuntimeError, match="CUDA error") if fails else contextlib.nullcontext():
        assert rendezvous() == "mapping"
    assert found == [(2, 3)]
    assert group.child_store("nvcomm/some name").get("key") == b"value"
    with pytest.raises(RuntimeError, match="some name"):
        c10d._resolve_process_group("nvcomm/some name")


def test_a_folder_that_cannot_be_made_or_joined_is_the_same_error_on_all(tmp_path, folders):
    for rank, method in ((0, "create"), (1, "join")):
        place = tmp_path / method
        place.mkdir()

        def body(group, rank=rank, method=method):
            def fail(*args):
                raise PermissionError(f"{method} failed")

            if group.rank == rank:
                setattr(MeetingFolder, method, fail)
            return build(group)

        results = run_ranks(2, body, place)
        assert [result["error"] for result in results] == ["CapabilityError"] * 2
        assert results[0]["text"] == results[1]["text"]
        assert f"rank {rank}: PermissionError: {method} failed" in results[0]["text"]
        assert_nothing_left(results, folders)
