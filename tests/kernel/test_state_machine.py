# SPDX-License-Identifier: Apache-2.0
"""Any sequence of collectives on one mailbox, eager and in graphs: every result the reference's, every audit clean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

import nvcomm
from nvcomm.mailbox import next_generation, next_slot
from tests.calls import calls, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RANKS = 4
BURSTS = st.lists(calls(6000, (torch.int32, torch.float64), (torch.bfloat16,)), min_size=1, max_size=5)
BOUNDS = settings(
    max_examples=12,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes of timeouts
    report_multiple_bugs=False,
    print_blob=True,
)


class Burst:
    """Calls that a rank makes one right after the other, with the tensors of all ranks."""

    def __init__(self, made, device):
        self.calls = made
        self.xs = [call.inputs(RANKS, device) for call in made]
        self.outs = [[torch.empty_like(one) for one in call.wanted(x)] for call, x in zip(made, self.xs, strict=True)]

    def refill(self, seed):
        """Other values, and outputs that no call could have left."""
        self.calls = [call.again(seed + i) for i, call in enumerate(self.calls)]
        for call, xs, outs in zip(self.calls, self.xs, self.outs, strict=True):
            for x, new, out in zip(xs, call.inputs(RANKS, xs[0].device), outs, strict=True):
                x.copy_(new)
                out.fill_(7)

    def launch(self, comm):
        """One rank's calls, on the current stream."""
        for call, xs, outs in zip(self.calls, self.xs, self.outs, strict=True):
            call.run(comm, xs[comm.rank], outs[comm.rank])

    def check(self):
        """Compares all ranks' results with the references."""
        for call, xs, outs in zip(self.calls, self.xs, self.outs, strict=True):
            for rank, want in enumerate(call.wanted(xs)):
                assert same_bits(outs[rank], want, sums=call.op != "gather"), (rank, call)

    @property
    def generations(self):
        """How many it takes."""
        return sum(call.moves for call in self.calls)


class OneMailbox(RuleBasedStateMachine):
    """Beside a world that lives as long as the module: where its slot and generation have to be."""

    graphs = Bundle("graphs")

    def __init__(self):
        super().__init__()
        self.world.reset()
        self.slot, self.generation = 0, self.world[0].audit().generation

    def step(self, generations):
        for _ in range(generations):
            self.slot, self.generation = next_slot(self.slot), next_generation(self.generation)

    def all_ranks(self, launch, late=None):
        """`launch(comm)` on every rank's own stream, nothing waited for in between; then all of it is over."""
        torch.cuda.synchronize()
        for comm in self.world:
            with torch.cuda.stream(comm.stream):
                if comm.rank == late:
                    torch.cuda._sleep(100_000)
                launch(comm)
        torch.cuda.synchronize()
        for comm in self.world:
            comm.check()

    @rule(made=BURSTS, late=st.integers(0, 2 * RANKS))
    def eager(self, made, late):
        burst = Burst(made, self.world.device)
        burst.refill(made[0].seed)
        self.all_ranks(burst.launch, late)
        burst.check()
        self.step(burst.generations)

    @rule(made=BURSTS)
    def from_another_stream(self, made):
        """Half of the burst on the rank's stream, half on another one: an event of ours puts them in order."""
        burst = Burst(made, self.world.device)
        burst.refill(made[0].seed)
        others = [torch.cuda.Stream() for _ in self.world]

        def launch(comm):
            for i, (call, xs, outs) in enumerate(zip(burst.calls, burst.xs, burst.outs, strict=True)):
                with torch.cuda.stream(others[comm.rank] if i % 2 else comm.stream):
                    call.run(comm, xs[comm.rank], outs[comm.rank])

        self.all_ranks(launch)
        burst.check()
        self.step(burst.generations)

    @rule(target=graphs, made=BURSTS)
    def capture(self, made):
        burst = Burst(made, self.world.device)
        torch.cuda.synchronize()
        captured = []
        for comm in self.world:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=comm.stream, capture_error_mode="thread_local"):
                burst.launch(comm)
            captured.append(graph)
        return burst, captured

    @rule(one=graphs, other=graphs, seed=st.integers(0, 2**31), times=st.integers(1, 4), late=st.integers(0, 2 * RANKS))
    def replay(self, one, other, seed, times, late):
        """Two graphs, perhaps the same, in turn and without waiting."""
        one[0].refill(seed)
        if other is not one:
            other[0].refill(seed + 1000)

        def launch(comm):
            for _ in range(times):
                one[1][comm.rank].replay()
                other[1][comm.rank].replay()

        self.all_ranks(launch, late)
        for burst, _ in (one, other):
            burst.check()
            self.step(times * burst.generations)

    @rule(graph=consumes(graphs))
    def destroy(self, graph):
        for one in graph[1]:
            one.reset()

    @rule()
    def reset(self):
        self.world.reset()
        self.slot, self.generation = 0, next_generation(self.generation)

    @invariant()
    def every_mailbox_is_empty_and_all_are_at_one_place(self):
        for comm in self.world:
            audit = comm.audit()
            assert (audit.dirty_words, audit.slot, audit.generation) == (0, self.slot, self.generation)


@pytest.mark.parametrize("pdl", ["safe", "early"])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # a burst of empty calls
def test_any_sequence_of_collectives(pdl):
    with nvcomm.virtual_world(RANKS, max_bytes=1 << 16, pdl=pdl, generation=2**32 - 50, timeout_s=3) as world:
        for op in ("all_reduce", "reduce_scatter"):
            world.prepare(op, torch.bfloat16)
        machine = type("OneMailbox", (OneMailbox,), {"world": world})
        run_state_machine_as_test(machine, settings=BOUNDS)
