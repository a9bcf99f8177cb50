# SPDX-License-Identifier: Apache-2.0
"""The torch operators: traced without a break, never removed, merged or moved."""

from __future__ import annotations

import functools

import pytest
import torch

import nvcomm
from nvcomm.errors import UsageError
from nvcomm.integrations import torch_ops
from tests.host.compiled_program import PROGRAM, compile_with, unused_and_twice

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def comm():
    """A world of one: every call is real, and returns at once."""
    with nvcomm.virtual_world(1, "cpu", max_bytes=1 << 16) as world:
        yield world[0]


class Spy:
    """Writes down the calls of `comm`, which it also makes."""

    def __init__(self, comm, monkeypatch):
        self.order = []
        for op in ("all_gather", "all_reduce", "reduce_scatter"):
            monkeypatch.setattr(comm, op, functools.partial(self._call, op, getattr(comm, op)))

    def _call(self, op, real, x):
        self.order.append(op)
        return real(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_graph_makes_the_calls_of_the_program_in_its_order(comm, monkeypatch, backend):
    ops, spy = torch_ops.register(comm), Spy(comm, monkeypatch)
    step = compile_with(unused_and_twice(ops), backend)
    x = torch.randn(6, 8)
    for replay in range(2):
        y, last = step(x)
        assert spy.order == PROGRAM * (replay + 1)
        assert torch.equal(y, x * 4 + 1)
        assert torch.equal(last, x)


def test_without_the_effect_the_compiler_does_remove(comm):
    """The negative control: an operator that is the same but for its effect."""
    ops = torch_ops.register(comm)
    calls = []

    @torch.library.custom_op("nvcomm_test::all_gather", mutates_args=())
    def all_gather(x: torch.Tensor, name: str, world_size: int) -> torch.Tensor:
        calls.append(name)
        return torch.ops.nvcomm.all_gather(x, name, world_size)

    @all_gather.register_fake
    def _(x, name, world_size):
        return x.new_empty((world_size, *x.shape))

    def step(x):
        torch.ops.nvcomm_test.all_gather(x, ops.name, 1)
        return torch.ops.nvcomm_test.all_gather(x * 2, ops.name, 1) + 1

    compile_with(step, "aot_eager")(torch.randn(3))
    assert len(calls) == 1


def test_sizes_may_be_symbols(comm):
    ops = torch_ops.register(comm)
    step = compile_with(unused_and_twice(ops), "aot_eager", dynamic=True)
    for rows in (4, 6, 7):
        x = torch.randn(rows, 3)
        assert torch.equal(step(x)[0], x * 4 + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_fakes_tell_the_shapes_of_the_real_ones(world_size):
    with nvcomm.virtual_world(world_size, "cpu", max_bytes=4096) as world:
        all_ops = [torch_ops.register(each) for each in world]
        for rows in (0, 1, world_size, 2 * world_size - 1, 7):
            for dtype in DTYPES:
                x = torch.ones(rows, 3, dtype=dtype)
                real, fake = {}, {}

                def both(comm, x=x, real=real, fake=fake):
                    ops = all_ops[comm.rank]
                    real[comm.rank] = [ops.all_gather(x), ops.all_reduce(x), ops.reduce_scatter(x)]

                world.run(both)
                for rank, ops in enumerate(all_ops):
                    meta = x.to("meta")
                    fake[rank] = [ops.all_gather(meta), ops.all_reduce(meta), ops.reduce_scatter(meta)]
                    assert [(y.shape, y.dtype) for y in fake[rank]] == [(y.shape, y.dtype) for y in real[rank]]


def test_operators_keep_torchs_own_rules(comm):
    ops = torch_ops.register(comm)
    x = torch.randn(4, 3)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.nvcomm.all_gather.default, (x, ops.name, 1), test_utils=checks)
    torch.library.opcheck(torch.ops.nvcomm.all_reduce.default, (x, ops.name), test_utils=checks)
    torch.library.opcheck(torch.ops.nvcomm.reduce_scatter.default, (x, ops.name, 0, 1), test_utils=checks)
    torch.library.opcheck(torch.ops.nvcomm.all_reduce_mhc.default, (*boundary(2), ops.name), test_utils=checks)


def boundary(rows, hidden=64, streams=4):
    """What a sublayer boundary takes beside this rank's contribution, which comes first."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return (
        random(rows, hidden).bfloat16(),
        random(rows, streams, hidden).bfloat16(),
        random(rows, streams),
        random(rows, streams, streams),
        random(rows, streams),
        random(hidden).bfloat16(),
        1e-6,
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_boundary_is_the_one_of_the_communicator(comm, backend):
    ops = torch_ops.register(comm)

    def step(x, residual, *others):
        ops.all_reduce_mhc(x, residual, *others)  # used by nobody, and made all the same
        residual, h = ops.all_reduce_mhc(x, residual, *others)
        last, none = ops.all_reduce_mhc(h, residual, *others[:2], None, None, others[-1])
        return residual, h, last, none

    tensors = boundary(3)
    wanted = comm.all_reduce_mhc(*tensors)
    wanted_last = comm.all_reduce_mhc(wanted[1], wanted[0], *tensors[2:4], None, None, 1e-6)[0]
    calls = comm.stats().calls
    residual, h, last, none = compile_with(step, backend)(*tensors)
    assert comm.stats().calls == calls + 3
    assert none is None
    for got, want in zip((residual, h, last), (*wanted, wanted_last), strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("collapse", [True, False])
def test_the_fake_of_a_boundary_tells_the_real_shapes(comm, rows, collapse):
    x, residual, post, comb, pre, norm_weight, eps = boundary(rows)
    others = (pre, norm_weight) if collapse else (None, None)
    real = torch.ops.nvcomm.all_reduce_mhc(x, residual, post, comb, *others, eps, torch_ops.register(comm).name)
    metas = [each if each is None else each.to("meta") for each in (x, residual, post, comb, *others)]
    fake = torch.ops.nvcomm.all_reduce_mhc(*metas, eps, "nobody asks")
    assert [(y.shape, y.dtype) for y in fake] == [(y.shape, y.dtype) for y in real]


def test_any_layout(comm):
    ops = torch_ops.register(comm)
    x = torch.randn(4, 6).t()
    assert torch.equal(ops.all_gather(x)[0], x)


def test_names(comm):
    ops = torch_ops.register(comm, "tp")
    assert torch_ops.register(comm, "tp") == ops
    with (
        nvcomm.virtual_world(1, "cpu", max_bytes=64) as other,
        pytest.raises(UsageError, match="another communicator is registered as 'tp'"),
    ):
        torch_ops.register(other[0], "tp")
    comm.close()
    with nvcomm.virtual_world(1, "cpu", max_bytes=64) as other:
        assert torch_ops.register(other[0], "tp").name == "tp"


def test_a_call_that_does_not_fit_is_refused(comm):
    x = torch.ones(4)
    ops = torch_ops.register(comm)
    with pytest.raises(UsageError, match="no communicator is registered as 'nobody'"):
        torch.ops.nvcomm.all_reduce(x, "nobody")
    with pytest.raises(UsageError, match="traced for rank None of 4, and .* is rank 0 of 1"):
        torch.ops.nvcomm.all_gather(x, ops.name, 4)
    with pytest.raises(UsageError, match="traced for rank 1 of 1"):
        torch.ops.nvcomm.reduce_scatter(x, ops.name, 1, 1)
    with pytest.raises(UsageError, match="got a scalar"):
        ops.reduce_scatter(torch.ones((), device="meta"))
    comm.close()
    with pytest.raises(UsageError, match="is closed"):
        ops.all_reduce(x)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_parameters_want_no_derivative(comm):
    """A layer as it comes: told what to do, eagerly and where the compiler asks; under no_grad it runs."""
    ops, layer, x = torch_ops.register(comm), torch.nn.Linear(8, 8), torch.randn(4, 8)

    def step(x):
        return ops.all_reduce(layer(x))

    with pytest.raises(UsageError, match=r"has no derivative.* under torch\.no_grad"):
        step(x).sum().backward()
    with pytest.raises(Exception, match=r"has no derivative.* under torch\.no_grad"):
        compile_with(step, "aot_eager")(x)
    with torch.no_grad():
        assert torch.equal(compile_with(step, "aot_eager")(x), layer(x))


def test_a_communicator_that_is_gone_is_not_kept():
    world = nvcomm.virtual_world(1, "cpu", max_bytes=64)
    ops = torch_ops.register(world[0])
    world.close()
    del world
    with pytest.raises(UsageError, match="no communicator is registered"):
        ops.all_reduce(torch.ones(1))


@pytest.mark.gpu
def test_operators_inside_a_cuda_graph():
    """Two ranks of this GPU: eager, then captured and replayed with other data."""
    with nvcomm.virtual_world(2, "cuda", max_bytes=1 << 16, timeout_s=5) as world:
        world.prepare("all_reduce", torch.float32)
        world.prepare("reduce_scatter", torch.float32)
        ops = [torch_ops.register(comm) for comm in world]
        xs = [torch.full((6, 32), float(rank + 1), device="cuda") for rank in range(2)]
        ys = {}

        def call(comm):
            rank = comm.rank
            ys[rank] = (
                ops[rank].all_gather(xs[rank]),
                ops[rank].all_reduce(xs[rank]),
                ops[rank].reduce_scatter(xs[rank]),
            )

        world.run(call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            world.run(call)
        for scale in (1, 10):
            for rank, x in enumerate(xs):
                x.fill_(scale * (rank + 1))
            graph.replay()
            torch.cuda.synchronize()
            for rank in range(2):
                gathered, reduced, part = ys[rank]
                assert torch.equal(gathered, torch.stack(xs))
                assert bool((reduced == 3 * scale).all())
                assert part.shape == (3, 32)
                assert bool((part == 3 * scale).all())
            world[0].check()


@pytest.mark.gpu
def test_a_compiled_boundary_inside_a_cuda_graph():
    with nvcomm.virtual_world(1, "cuda", max_bytes=1 << 16, timeout_s=5) as world:
        comm = world[0]
        built = comm.mhc(64)
        ops = torch_ops.register(comm)
        step = compile_with(lambda *tensors: ops.all_reduce_mhc(*tensors), "aot_eager")
        tensors = [each.cuda() if isinstance(each, torch.Tensor) else each for each in boundary(5)]
        wanted = built(*tensors)
        got = {}

        def call(comm):
            got[comm.rank] = step(*tensors)

        world.run(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            world.run(call)
        for y in got[0]:
            y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for y, want in zip(got[0], wanted, strict=True):
            assert torch.equal(y.view(torch.int16), want.view(torch.int16))
        comm.check()


@pytest.mark.gpu
def test_a_compiled_step_on_a_gpu():
    with nvcomm.virtual_world(1, "cuda", max_bytes=1 << 16, timeout_s=5) as world:
        comm = world[0]
        world.prepare("all_reduce", torch.float32)
        world.prepare("reduce_scatter", torch.float32)
        step = compile_with(unused_and_twice(torch_ops.register(comm)), "aot_eager")
        x = torch.randn(6, 8, device="cuda")
        y, _ = step(x)
        assert torch.equal(y, x * 4 + 1)
        assert comm.stats().calls == len(PROGRAM)
