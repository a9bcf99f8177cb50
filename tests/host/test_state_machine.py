# SPDX-License-Identifier: Apache-2.0
"""Any sequence of collectives on one mailbox, between threads: every result the reference's, every audit clean."""

from __future__ import annotations

import functools
import os
import time
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import nvcomm
from nvcomm.host.words import clear_words
from nvcomm.mailbox import GENERATION_MASK, next_generation, next_slot
from tests.calls import calls, same_bits

CPU = torch.device("cpu")


class OneMailbox(RuleBasedStateMachine):
    """Keeps, beside a world, what its slot and generation have to be."""

    @initialize(
        world_size=st.integers(1, 4),
        transport=st.sampled_from(["auto", "delayed"]),
        checks=st.booleans(),
        generation=st.one_of(st.just(0), st.integers(GENERATION_MASK - 5, GENERATION_MASK)),
        seed=st.integers(0, 1000),
    )
    def build(self, world_size, transport, checks, generation, seed):
        with mock.patch.dict(os.environ, {"NVCOMM_DEVICE_CHECKS": str(int(checks))}):
            self.world = nvcomm.virtual_world(
                world_size, "cpu", max_bytes=8192, transport=transport, generation=generation, seed=seed, timeout_s=60
            )
        self.slot, self.generation = 0, generation
        self.build_broken()

    def build_broken(self):
        """For the negative controls."""

    @rule(
        burst=st.lists(calls(1000), min_size=1, max_size=6),
        late=st.integers(0, 3),
        late_by_us=st.just(0) | st.just(500),
    )
    def make_calls(self, burst, late, late_by_us):
        """Ranks make several calls in a row and wait for nobody in between; one may come late."""
        xs = [call.inputs(len(self.world), CPU) for call in burst]
        wanted = [call.wanted(x) for call, x in zip(burst, xs, strict=True)]
        outs = [[torch.full_like(one, 7) for one in ones] for ones in wanted]

        def work(comm):
            for call, x, out in zip(burst, xs, outs, strict=True):
                if comm.rank == late and late_by_us:
                    time.sleep(late_by_us / 1e6)
                call.run(comm, x[comm.rank], out[comm.rank])

        self.world.run(work)
        for call, out, want in zip(burst, outs, wanted, strict=True):
            for rank in range(len(self.world)):
                assert same_bits(out[rank], want[rank], sums=call.op != "gather"), (rank, call)
        for call in burst:
            if call.moves:
                self.slot, self.generation = next_slot(self.slot), next_generation(self.generation)

    @rule()
    def reset(self):
        """Allowed at any time."""
        self.world.reset()
        self.slot, self.generation = 0, next_generation(self.generation)

    @invariant()
    def every_mailbox_is_empty_and_all_are_at_one_place(self):
        for comm in getattr(self, "world", ()):
            audit = comm.audit()
            assert (audit.dirty_words, audit.slot, audit.generation) == (0, self.slot, self.generation)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


BOUNDS = settings(
    max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestOneMailbox = OneMailbox.TestCase
TestOneMailbox.settings = BOUNDS


class OneWordStays(OneMailbox):
    """Rank 0 forgets to clear the last word of what it collected."""

    def build_broken(self):
        steps = self.world[0].engine._steps
        steps.clear = lambda row, start, stop: clear_words(row.words[start : stop - 1])


class RanksInARow(OneMailbox):
    """Sums are formed in another order."""

    def build_broken(self):
        self.patch = mock.patch("nvcomm.host.reduce.tree_sum", lambda parts: functools.reduce(torch.add, parts))
        self.patch.start()

    def teardown(self):
        mock.patch.stopall()
        super().teardown()


@pytest.mark.parametrize("broken", [OneWordStays, RanksInARow])
def test_it_finds_a_break(broken):
    """The negative control; what was found is neither shrunk nor kept, and the sequences are the same in every run."""
    once = settings(
        max_examples=300, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(broken, settings=once)
