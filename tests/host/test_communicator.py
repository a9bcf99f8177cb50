# SPDX-License-Identifier: Apache-2.0
"""The public communicator on CPU tensors: what bad input gets, and that nothing is lost by it."""

from __future__ import annotations

import functools
import os
import warnings

import pytest
import torch

import nvcomm
from nvcomm.group import local_groups
from nvcomm.memory import room
from nvcomm.options import Options
from tests.threads import together

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def world():
    with nvcomm.virtual_world(WORLD_SIZE, "cpu", max_bytes=4096, timeout_s=60) as world:
        yield world


def gather_and_check(world, call=0):
    xs = [torch.arange(9, dtype=torch.int64) + 100 * rank + call for rank in range(WORLD_SIZE)]
    for y in world.all_gather(xs):
        assert torch.equal(y, torch.stack(xs))


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)


BAD = {
    "layout": lambda: torch.zeros((4, 4)).to_sparse(),
    "quantized": quantized,
    "meta": lambda: torch.zeros(4, device="meta"),
    "requires grad": lambda: torch.zeros(4, requires_grad=True),
    "conjugate": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "contiguous": lambda: torch.zeros((4, 4)).t(),
    "at most 4096": lambda: torch.zeros(1025),
    "torch.Tensor": lambda: [1, 2, 3],
}


@pytest.mark.parametrize("says", BAD)
def test_a_bad_input_is_refused_before_anything_is_sent(world, says):
    before = [comm.audit() for comm in world]
    with pytest.raises(nvcomm.UsageError, match=says):
        world[0].all_gather(BAD[says]())
    assert [comm.audit() for comm in world] == before
    gather_and_check(world)


def test_a_tensor_that_requires_grad_is_taken_while_grad_is_off(world):
    xs = [torch.full((3,), float(rank), requires_grad=True) for rank in range(WORLD_SIZE)]
    with torch.no_grad():
        ys = world.all_gather(xs)
    assert torch.equal(ys[0], torch.stack([x.detach() for x in xs]))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.zeros(4), "wanted torch.float32"),
        (torch.zeros((2, 4), dtype=torch.float64), "wanted torch.float32"),
        (torch.zeros((4, 2)).t(), "not contiguous"),
        (torch.zeros((2, 4), requires_grad=True), "requires grad"),
        ("out", "wanted a torch.Tensor"),
    ],
)
def test_a_bad_output_is_refused(world, out, says):
    with pytest.raises(nvcomm.UsageError, match=says):
        world[0].all_gather(torch.zeros(4), out)
    gather_and_check(world)


def test_an_output_over_its_input_is_refused(world):
    storage = torch.zeros(8)
    with pytest.raises(nvcomm.UsageError, match="overlaps"):
        world[0].all_gather(storage[4:], storage.view(2, 4))


def test_outputs_of_the_caller_are_filled_and_returned(world):
    xs = [torch.full((2, 2), rank) for rank in range(WORLD_SIZE)]
    outs = [torch.zeros((WORLD_SIZE, 2, 2), dtype=torch.int64) for _ in range(WORLD_SIZE)]
    ys = world.all_gather(xs, outs)
    assert all(y is out for y, out in zip(ys, outs, strict=True))
    assert torch.equal(outs[1], torch.stack(xs))


def test_a_group_call_wants_one_tensor_a_rank(world):
    with pytest.raises(nvcomm.UsageError, match="2 ranks"):
        world.all_gather([torch.zeros(1)])


def test_stats_and_audit_of_every_rank(world):
    before = world[0].stats()
    gather_and_check(world)
    after = world[0].stats()
    assert (after.calls - before.calls, after.bytes - before.bytes) == (1, 72)
    assert len({(audit.slot, audit.generation, audit.dirty_words) for audit in (comm.audit() for comm in world)}) == 1


def test_a_closed_communicator_says_so():
    with nvcomm.virtual_world(1, "cpu") as world:
        comm = world[0]
    with pytest.raises(nvcomm.UsageError, match="closed"):
        comm.all_gather(torch.zeros(1))
    comm.close()  # harmless


def test_a_forked_child_is_refused_and_the_parent_goes_on(world):
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            world[0].all_gather(torch.zeros(1))
        except nvcomm.UsageError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "forked" in answer.read()
    gather_and_check(world, 5)


def test_a_communicator_that_nobody_closed_warns():
    world = nvcomm.virtual_world(1, "cpu")
    with pytest.warns(ResourceWarning, match="not closed"):
        world[0].__del__()
    world.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_bytes", 8),
        ("timeout_s", 0.0),
        ("pdl", "soon"),
        ("device_share", 1.5),
        ("generation", -1),
        ("protocol", "lamport"),
        ("transport", "pigeon"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(nvcomm.UsageError, match=name):
        Options(**{name: value})


@pytest.mark.parametrize("world_size", [0, 9])
def test_worlds_without_kernels_are_refused(world_size):
    with pytest.raises(nvcomm.UsageError, match="1 to 8"):
        nvcomm.virtual_world(world_size, "cpu")


def test_multicast_is_not_for_cpus():
    with pytest.raises(nvcomm.UnsupportedError, match="multicast"):
        nvcomm.virtual_world(2, "cpu", transport="multicast")


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(nvcomm.UnsupportedError, match="finds no CUDA GPU here: take device='cpu'"):
        nvcomm.virtual_world(2, "cuda")


def test_R11_ranks_compare_the_callers_tag(monkeypatch):
    monkeypatch.setenv("NVCOMM_DEVICE_CHECKS", "1")
    with nvcomm.virtual_world(WORLD_SIZE, "cpu", timeout_s=60) as world:
        for comm in world:
            comm.tag = 65535
        gather_and_check(world)
        world[1].tag = 4
        with pytest.raises(nvcomm.CollectiveMismatchError, match="tag 4") as caught:
            gather_and_check(world)
        assert "tag 65535" in str(caught.value)
        world.reset()
        world[0].tag = 4
        gather_and_check(world)


def test_without_checks_a_tag_costs_and_does_nothing(world):
    world[0].tag = 9
    gather_and_check(world)
    world[0].tag = 0


@pytest.mark.parametrize("tag", [-1, 65536])
def test_a_tag_that_does_not_fit_is_refused(world, tag):
    with pytest.raises(nvcomm.UsageError, match="tag"):
        world[0].tag = tag
    assert world[0].tag == 0


def test_a_reset_of_the_world_forgets_a_first_half(world):
    world[0].begin("first half", pending="its second half")
    with pytest.raises(nvcomm.UsageError, match="its second half has to be next"):
        world[0].all_gather(torch.zeros(1))
    world.reset()
    gather_and_check(world)


@pytest.mark.parametrize(
    ("name", "values"),
    [("max_bytes", (64, 128)), ("generation", (0, 5)), ("protocol", ("mailbox", "late-copy")),
     ("transport", ("peer", "delayed"))],
)  # fmt: skip
def test_ranks_that_chose_differently_get_the_same_error(name, values):
    groups = local_groups(2)

    def build(rank):
        return nvcomm.Communicator(groups[rank], "cpu", **{"max_bytes": 64, "timeout_s": 60.0, name: values[rank]})

    errors = together([functools.partial(build, rank) for rank in range(2)])
    assert [type(error) for error in errors] == [nvcomm.CapabilityError] * 2, errors
    assert str(errors[0]) == str(errors[1])
    assert f"disagree on {name}: rank 0: " in str(errors[0])


def test_a_protocol_of_kernels_alone_is_refused_by_its_name():
    with pytest.raises(nvcomm.UnsupportedError, match="protocol='copy' needs GPUs"):
        nvcomm.virtual_world(2, "cpu", protocol="copy")


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(90.0, 90.0), (2.0, 30.0)])
def test_ranks_find_each_other_within_the_timeout_that_was_asked_for(monkeypatch, timeout_s, bound_s):
    """30 seconds at least: programs start seconds apart."""
    bounds = []

    def late(bound_s):
        bounds.append(bound_s)
        raise nvcomm.GroupError("nobody came")

    monkeypatch.setattr("nvcomm.group.origin.started_by", lambda: "torchrun")
    monkeypatch.setattr("nvcomm.group.origin.from_environment", late)
    with pytest.raises(nvcomm.GroupError, match="nobody came"):
        nvcomm.Communicator(None, "cpu", timeout_s=timeout_s)
    assert bounds == [bound_s]


def test_mailboxes_that_the_host_has_no_room_for_are_refused(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(room, "MEMINFO", meminfo)
    groups = local_groups(2)

    def build(rank):
        with nvcomm.Communicator(groups[rank], "cpu", max_bytes=1 << 20, timeout_s=60.0) as comm:
            return comm.all_gather(torch.tensor([rank])).flatten().tolist()

    def attempt():
        return together([functools.partial(build, rank) for rank in range(2)])

    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 4096 kB\nSwapFree: 1024 kB\n")
    errors = attempt()
    assert [type(error) for error in errors] == [nvcomm.CapabilityError] * 2, errors
    assert "GiB, and this host has 0.00488 GiB left: lower max_bytes" in str(errors[0])
    with pytest.raises(nvcomm.UnsupportedError, match="lower max_bytes"):
        nvcomm.virtual_world(2, "cpu", max_bytes=1 << 20)
    for text in ("MemAvailable: 9000 kB\nSwapFree: 1024 kB\n", "nothing known\n"):
        meminfo.write_text(text)
        assert attempt() == [[0, 1]] * 2


@pytest.mark.parametrize("odd", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_launchers_variable_that_is_no_number_is_shown(monkeypatch, odd):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "some" if name == odd else "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(nvcomm.UsageError, match=f"'some'.*numbers in .*{odd}"):
        nvcomm.Communicator(None, "cpu")
