# SPDX-License-Identifier: Apache-2.0
"""What a caller may get wrong: every public name answers with a typed error, at once, and works on afterwards."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

import nvcomm
from nvcomm.collectives.all_reduce_mhc_checks import BoundaryArguments, check_boundary
from nvcomm.integrations import torch_ops
from nvcomm.options import Options

WORLD_SIZE = 2
OPS = ("all_gather", "all_reduce", "reduce_scatter")
X = torch.arange(4.0)


@pytest.fixture(scope="module")
def world():
    with nvcomm.virtual_world(WORLD_SIZE, "cpu", max_bytes=4096, timeout_s=60) as world:
        yield world


@pytest.fixture(autouse=True)
def _goes_on(world):
    """A refusal costs nothing: it comes at once, and the next call of all ranks is right."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 30  # half of what a rank that was waited for would take
    assert torch.equal(world.all_gather([X, X])[1], torch.stack([X, X]))


def refused(says):
    return pytest.raises(nvcomm.UsageError, match=says)


@pytest.mark.parametrize("world_size", ["4", 2.0, None, True, -1])
def test_a_number_of_ranks_that_is_none(world_size):
    with refused("1 to 8"):
        nvcomm.virtual_world(world_size, "cpu")


@pytest.mark.parametrize("device", ["cppu", -1, [], 1.5, "cuda:x", torch.float32, "meta"])
def test_a_device_that_is_none(device):
    with refused("device is"):
        nvcomm.virtual_world(2, device)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_bytes", ["4M", 4.5e6, None, -4, 0, True, 1 << 40]),
        ("timeout_s", ["5", None, 0, -1, math.nan, math.inf, True]),
        ("device_share", ["half", None, 0, math.nan]),
        ("generation", [1.5, "a", None, -1, 1 << 32]),
        ("seed", ["a", 0.5, -1, 1 << 64]),
        ("pdl", [None, ["off"], "eager"]),
        ("protocol", [None, "Mailbox", ["mailbox"]]),
        ("transport", [None, "tcp", 0]),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(name, values):
    for value in values:
        with refused(f"{name} is "):
            Options(**{name: value})


@pytest.mark.parametrize("group", [5, "tp", [0, 1], object()])
def test_a_group_that_is_none(group):
    with refused("wanted a torch.distributed process group"):
        nvcomm.Communicator(group, "cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("xs", "says"),
    [
        (None, "got a NoneType as inputs"),
        (torch.zeros(2, 4), "got a Tensor as inputs"),
        ([X], "got 1 inputs"),
        ([X, None], "got a NoneType; wanted a torch.Tensor"),
        ([1, 2], "got a int; wanted a torch.Tensor"),
        ([X, torch.zeros(6)], r"rank 0 has torch.float32 \(4,\) and rank 1 torch.float32 \(6,\)"),
        ([X, torch.zeros(9, dtype=torch.float16)], "on every rank"),
    ],
)
def test_inputs_of_a_world(world, op, xs, says):
    with refused(f"{op}: .*{says}"):
        getattr(world, op)(xs)


def test_outputs_of_a_world(world):
    for outs, says in (("ab", "got a str as outputs"), ([X], "got 1 outputs")):
        with refused(says):
            world.all_reduce([X, X], outs)


def test_bytes_of_different_dtypes_may_be_gathered_but_not_added(world):
    halves = X.to(torch.bfloat16).repeat(2)
    ys = world.all_gather([X, halves])
    assert torch.equal(ys[1][0].view(torch.float32), X)
    with refused("same dtype and shape"):
        world.all_reduce([X, halves])


@pytest.mark.parametrize("op", OPS)
def test_a_nested_tensor(world, op):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with refused(f"{op}: got a nested tensor"):
        getattr(world[0], op)(nested)
    with refused("out is a nested tensor"):
        world[0].all_gather(X, nested)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_without_a_sum(world, op, dtype):
    with refused(f"{op}: got {dtype}; wanted one of torch.bfloat16"):
        getattr(world[0], op)(torch.ones(4).to(dtype))
    with refused(f"{op}: got {dtype}"):
        world.prepare(op, dtype)


@pytest.mark.parametrize("op", ["allreduce", "all_gather", None, 3])
def test_preparing_what_is_no_sum(world, op):
    with refused(f"op is {op!r}; wanted 'all_reduce' or 'reduce_scatter'"):
        world[0].prepare(op, torch.float32)


def test_preparing_no_dtype(world):
    for dtype in ("bf16", None):
        with refused(f"got {dtype!r}"):
            world.prepare("all_reduce", dtype)


@pytest.mark.parametrize("protocol", ["LL", "one_shot", None, 3, ["ll"], ""])
def test_a_protocol_that_there_is_not(world, protocol):
    for call in (world.all_reduce, lambda xs, **kw: world[0].all_reduce(xs[0], **kw)):
        with refused("wanted 'auto', 'll' or 'two_shot'"):
            call([X, X], protocol=protocol)


@pytest.mark.parametrize("tag", ["a", 1.5, None, True])
def test_a_tag_that_is_no_number(world, tag):
    with refused("whole number from 0 to 65535"):
        world[0].tag = tag


@pytest.mark.parametrize("hidden", [0, -64, 63, 65600, "5120", None, 64.0])
def test_a_width_that_no_kernel_takes(world, hidden):
    with refused("hidden is"):
        world[0].mhc(hidden)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_streams": "4"}, "residual streams; wanted: 1 to 4"),
        ({"num_streams": 5}, "residual streams; wanted: 1 to 4"),
        ({"top_k": 17}, "top_k is 17; wanted: 0 to 16"),
        ({"parts": ("fuse",)}, "wanted one or several of"),
        ({"parts": "fused"}, "wanted one or several of"),
        ({"parts": ()}, "wanted one or several of"),
        ({"parts": ("finalize",)}, "give mhc.. their number, top_k"),
    ],
)
def test_a_boundary_that_cannot_be_built(world, options, says):
    with refused(says):
        world[0].mhc(64, **options)


def test_a_watcher_of_nothing_or_for_nobody(world):
    with refused("interval_s is"):
        world[0].watch(print, "often")
    with refused("on_fault is None"):
        world[0].watch(None)
    closed = nvcomm.virtual_world(1, "cpu")
    closed.close()
    with refused("closed"):
        closed[0].watch(print)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: world.all_gather([X]),
        lambda world: world.all_reduce([X]),
        lambda world: world.run(lambda comm: None),
        lambda world: world.reset(),
        lambda world: world.prepare("all_reduce", torch.float32),
        lambda world: world[0].stats(),
        lambda world: world[0].audit(),
        lambda world: world[0].check(),
        lambda world: world[0].reset(),
        lambda world: world[0].mhc(64),
    ],
)
def test_a_closed_world_says_so(call):
    closed = nvcomm.virtual_world(1, "cpu")
    closed.close()
    closed.close()  # harmless
    with refused("is closed"):
        call(closed)


HIDDEN, STREAMS, ROWS = 64, 4, 3


def boundary_arguments():
    return {
        "x": torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16),
        "residual": torch.zeros(ROWS, STREAMS, HIDDEN, dtype=torch.bfloat16),
        "post": torch.zeros(ROWS, STREAMS),
        "comb": torch.zeros(ROWS, STREAMS, STREAMS),
        "pre": torch.zeros(ROWS, STREAMS),
        "norm_weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "eps": 1e-6,
    }


@pytest.fixture
def alone():
    """One rank, whose boundary has experts and halves."""
    with nvcomm.virtual_world(1, "cpu", max_bytes=4096) as world:
        boundary = world[0].mhc(HIDDEN, top_k=2, parts=("fused", "finalize", "publish", "collect"))
        yield boundary
        new_residual, h = boundary(**boundary_arguments())
        assert new_residual.shape == (ROWS, STREAMS, HIDDEN)
        assert h.shape == (ROWS, HIDDEN)


@pytest.mark.parametrize("name", ["x", "residual", "post", "comb", "pre", "norm_weight"])
def test_tensors_of_a_boundary(alone, name):
    good = boundary_arguments()[name]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    bad = [[1], good.double(), good[..., :-1], good.to("meta"), nested, torch.tensor(1.0)]
    bad += [good.repeat(1, 2)[:, ::2]] if good.dim() == 2 else []
    for value in bad:
        with refused("wanted|contiguous"):
            alone(**boundary_arguments() | {name: value})


@pytest.mark.parametrize("eps", ["a", None, -1.0, math.nan, math.inf, 10**400, torch.tensor(1e-6), True])
def test_an_eps_that_is_no_number(alone, eps):
    with refused("eps is"):
        alone(**boundary_arguments() | {"eps": eps})


@pytest.mark.parametrize("eps", [0, 1, np.float32(1e-6), np.float64(1e-6), np.int64(1)])
def test_an_eps_of_any_kind_of_number(alone, eps):
    """What is launched takes Python's own numbers alone."""
    x, *common = (boundary_arguments() | {"eps": eps}).values()
    checked = check_boundary(alone.shape, alone.comm, ROWS, BoundaryArguments(*common, new_residual=None, h=None), x)
    assert type(checked.eps) is float
    assert checked.eps == eps
    alone(x, *common)


def test_outputs_over_inputs(alone):
    given = boundary_arguments()
    longer = torch.zeros(ROWS + 1, STREAMS, HIDDEN, dtype=torch.bfloat16)
    for outputs, says in (
        ({"residual": longer[:ROWS], "new_residual": longer[1:]}, "new_residual lies over"),
        ({"h": given["x"]}, "h lies over"),
        ({"h": given["residual"].view(-1, HIDDEN)[:ROWS]}, "h lies over"),
        ({"new_residual": longer[:ROWS], "h": longer.view(-1, HIDDEN)[:ROWS]}, "h lies over"),
    ):
        with refused(says):
            alone(**given | outputs)
    new_residual, h = alone(**given, new_residual=given["residual"])
    assert new_residual is given["residual"]
    assert h is not None


def test_an_h_where_nothing_collapses(alone):
    given = boundary_arguments() | {"pre": None, "norm_weight": None}
    with refused("no h without pre"):
        alone(**given, h=torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16))
    assert alone(**given)[1] is None


def test_more_rows_of_experts_than_fit(alone):
    rows = alone.max_rows + 1
    experts, weights = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(rows, 2)
    given = {name: one for name, one in boundary_arguments().items() if name != "x"}
    for name in ("residual", "post", "comb", "pre"):
        given[name] = given[name][:1].repeat(rows, *[1] * (given[name].dim() - 1))
    with refused(f"got {rows} rows of 128 bytes; this communicator was built for at most 4096"):
        alone.finalize(experts, weights, torch.zeros(rows, 2, dtype=torch.int32), None, **given)


def test_a_boundary_of_other_shapes(alone):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for residual, says in ((None, "a NoneType"), (torch.zeros(3, 64), r"\(3, 64\)"), (nested, "nested")):
        with refused(f"residual is {says}; wanted a tensor"):
            alone.comm.all_reduce_mhc(**boundary_arguments() | {"residual": residual})


def test_experts_that_there_are_not(alone):
    experts = {
        "experts": torch.zeros(8, HIDDEN, dtype=torch.bfloat16),
        "expert_weights": torch.zeros(ROWS, 2),
        "expert_indices": torch.zeros(ROWS, 2, dtype=torch.int32),
        "shared": None,
    }
    rest = {name: value for name, value in boundary_arguments().items() if name != "x"}
    for indices in (8, -2):
        with refused(f"expert_indices are {indices} to {indices}; wanted rows of experts, 0 to 7, or -1"):
            alone.finalize(**experts | {"expert_indices": torch.full((ROWS, 2), indices, dtype=torch.int32)}, **rest)
    for name in experts:
        with refused(name):
            alone.finalize(**experts | {name: [1]}, **rest)
    with refused("give mhc.. a top_k"):
        alone.comm.mhc(HIDDEN).finalize(**experts, **rest)


def test_a_half_that_cannot_be_followed_is_not_begun(alone):
    with pytest.raises(nvcomm.UnsupportedError, match=r"call publish\(x\)"):
        alone.publish_target(1)
    for rows in (0, -1, "1", 1.0, 1 << 40):
        with refused("publish_target: got"):
            alone.publish_target(rows)
    given = boundary_arguments()
    fused, publishing = alone.comm.mhc(HIDDEN), alone.comm.mhc(HIDDEN, parts=("publish",))
    with refused("'publish' and 'collect' was not built"):
        fused.publish(given["x"])
    with refused("'collect' was not built"):
        publishing.publish(given["x"])
    with refused("'fused' was not built"):
        publishing(**given)


def test_registering_what_is_no_communicator_or_no_name(world):
    with refused("comm is a NoneType"):
        torch_ops.register(None)
    for name in (3, ""):
        with refused(f"name is {name!r}"):
            torch_ops.register(world[0], name)
    with refused("all_reduce: got torch.int64"):
        torch_ops.register(world[0]).all_reduce(torch.arange(3))
