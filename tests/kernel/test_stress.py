# SPDX-License-Identifier: Apache-2.0
"""The stress harness on a GPU: its kernels against the host's oracle, its eye for a single wrong word, short runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from stress import oracle, report  # noqa: E402
from stress.gpu_rank import GpuRank  # noqa: E402
from stress.graph_steps import NOTHING, TurnStep  # noqa: E402
from stress.plan import GraphSpec, Plan, PlanConfig  # noqa: E402

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
RANKS, RANK = 4, 2
SIZES = (4, 4099, 260)
GATHERS_PER_GRAPH = 24


class Copier:
    """A gather that is wrong: every row is this rank's own input."""

    rank, world_size = RANK, RANKS

    def all_gather(self, x, out=None):
        for row in out:
            row.copy_(x)
        return out

    def serving(self):
        return contextlib.nullcontext()


@pytest.fixture
def rank(seed):
    plan = Plan(PlanConfig(seed, RANKS, replays_per_graph=2, max_bytes=64 << 10, num_big=0))
    built = GpuRank(Copier(), plan, torch.device("cuda", 0), torch.cuda.Stream())
    built.load()
    yield built
    built.close()


def turn(rank, check, fill, *, replay, step=0):
    """One turn at `replay`; returns what the ledger says then."""
    rank.ledger[0] = replay
    torch.cuda.synchronize()
    rank._launch_turn(TurnStep(check, fill, 0, 1, step))
    torch.cuda.synchronize()
    rank.snapshot()
    torch.cuda.synchronize()
    return rank.reading()


def set_outputs(rank, replay):
    for gather, words in enumerate(SIZES):
        rows = rank._plan.oracle.rows(gather, replay, words).reshape(-1)
        rank.out[gather, : rows.size] = torch.from_numpy(rows.view(np.int32)).cuda()


@pytest.mark.parametrize("step", [0, 1])
def test_a_turn_fills_what_the_host_oracle_says(rank, step):
    turn(rank, NOTHING, SIZES, replay=41, step=step)
    assert int(rank.ledger[1]) == 41 + step
    for gather, words in enumerate(SIZES):
        filled = rank.x[gather].cpu().numpy().view(np.uint32)
        assert np.array_equal(filled[:words], rank._plan.oracle.row(RANK, gather, 41 + step, words))
        assert not filled[words:].any()


def test_a_turn_finds_nothing_wrong_in_right_outputs(rank):
    set_outputs(rank, 1_234_567)
    reading = turn(rank, SIZES, NOTHING, replay=1_234_567)
    assert (reading.bad_words, reading.first, reading.gathers) == (0, None, 3)


@pytest.mark.parametrize(("gather", "src_rank", "index"), [(0, 0, 0), (1, 3, 4098), (2, 1, 130)])
def test_a_turn_finds_one_flipped_bit_and_says_where(rank, gather, src_rank, index):
    set_outputs(rank, 77)
    place = src_rank * SIZES[gather] + index
    rank.out[gather, place] ^= 1 << 7
    seen = int(rank.out[gather, place]) & 0xFFFFFFFF
    reading = turn(rank, SIZES, NOTHING, replay=77)
    assert reading.bad_words == 1
    first = reading.first
    assert (first.replay, first.gather, first.src_rank, first.index, first.seen) == (77, gather, src_rank, index, seen)


def test_outputs_of_the_replay_before_are_all_wrong(rank):
    set_outputs(rank, 76)
    # The reserved words, one in a hundred, may agree by chance.
    assert turn(rank, SIZES, NOTHING, replay=77).bad_words > 0.99 * RANKS * sum(SIZES)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("late_rank", [None, RANK])
def test_a_graph_counts_its_replays_and_checks_every_gather(rank, spaced, late_rank):
    spec = GraphSpec(0, (SIZES, (1000, 16, 8)), late_rank, spaced, big=False)
    (launch,) = rank.capture([spec])
    launches = 5
    for _ in range(launches):
        launch()
    torch.cuda.synchronize()
    rank.snapshot()
    torch.cuda.synchronize()
    reading = rank.reading()
    assert reading.replay == 2 * launches
    assert reading.gathers == 2 * launches * oracle.GATHERS_PER_REPLAY
    words = launches * sum(sum(sizes) for sizes in spec.replays)
    # Three of four rows are not the sender's; of their words only reserved ones may agree.
    assert 0.98 * 3 * words < reading.bad_words <= 3 * words
    assert reading.first.src_rank != RANK


class Skipper:
    """A rank that leaves one gather of each graph out."""

    def __init__(self, comm):
        self.comm = comm
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def all_gather(self, x, out=None):
        self.calls += 1
        return out if self.calls % GATHERS_PER_GRAPH == 5 else self.comm.all_gather(x, out=out)


def test_a_rank_that_leaves_a_call_out_is_named():
    import nvcomm
    from stress.processes import Alone
    from stress.replay_gpu import replay
    from stress.run import Progress, RunConfig

    config = RunConfig("virtual", "auto", "mailbox", "all_gather", RANKS, 3, 80, None, 1.0)
    with nvcomm.virtual_world(RANKS, max_bytes=4 << 20, timeout_s=1.0) as world:
        comms = [Skipper(comm) if comm.rank == RANK else comm for comm in world]
        streams = [world.stream(rank) for rank in range(RANKS)]
        hangs = []
        outcome = replay(comms, streams, config, Progress(), lambda _, hang: hangs.append(hang), Alone())
    assert hangs == []
    assert outcome.hang is not None
    assert RANK in outcome.hang.root_ranks
    assert {wait.src_rank for wait in outcome.hang.waits if wait.rank != RANK} == {RANK}
    assert all(1.0 <= wait.waited_s < 2.5 for wait in outcome.hang.waits)
    assert report.Report(config, outcome, None, {}).verdict == "failed"


def stress(*arguments: str) -> tuple[int, dict, str]:
    done = subprocess.run(
        [sys.executable, "-m", "stress", *arguments, "--json", "-"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.parametrize("pdl", ["safe", "off", "early"])
def test_a_short_run_is_proven(pdl):
    code, result, errors = stress("--world", "virtual", "--replays", "4000", "--pdl", pdl)
    assert code == report.EXIT_PROVEN, errors
    assert (result["replays"], result["gathers"], result["bad_words"]) == (4000, 12000, 0)
    assert result["control"]["failed_as_it_must"]
    assert result["control"]["first_bad"]["kind"] == "stale"
    assert result["audit"] == []
    assert result["machine"]["gpu"]


def test_the_delayed_transport_is_proven_too():
    code, result, errors = stress("--world", "virtual", "--replays", "2000", "--transport", "delayed")
    assert code == report.EXIT_PROVEN, errors
    assert (result["transport"], result["bad_words"], result["gathers"]) == ("delayed", 0, 6000)
    assert result["control"]["first_bad"]["kind"] == "stale"


def test_the_known_bad_protocol_exits_1_with_the_first_word_decoded():
    code, result, errors = stress(
        "--world", "virtual", "--replays", "2000", "--protocol", "late-copy", "--timeout", "2"
    )
    assert code == report.EXIT_BAD, errors
    assert result["bad_words"] > 0
    assert result["first_bad"]["kind"] == "stale"
    assert "first wrong word: rank" in errors
