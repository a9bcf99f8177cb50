# SPDX-License-Identifier: Apache-2.0
"""The vote: the same error on every rank, whatever one of them finds; ranks are threads here."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from nvcomm.capability import PACKAGES, Requirement, agree, check, vote
from nvcomm.capability.facts import facts_of
from nvcomm.capability.texts import fitting
from nvcomm.errors import CapabilityError, GroupError, UnsupportedError, UsageError
from nvcomm.group import MAX_ANSWER_BYTES, local_groups

LIMIT_S = 40.0


def on_all(world_size, work, ranks=None):
    """`work(group)` on every rank at once, or on `ranks` alone: results or exceptions, by rank."""
    groups = local_groups(world_size)
    ranks = range(world_size) if ranks is None else ranks
    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(work, groups[rank]) for rank in ranks]
        return [future.exception(2 * LIMIT_S) or future.result() for future in futures]


def refused(results):
    """The one error that every rank raised."""
    assert [type(result) for result in results] == [CapabilityError] * len(results)
    assert len({(str(result), str(result.reasons)) for result in results}) == 1
    return results[0]


def needs(probe, name="a thing", stage="device", scope="rank"):
    return Requirement(name, stage, scope, probe)


def holds():
    return None


def test_ranks_that_meet_everything_go_on():
    def work(group):
        check([needs(holds), needs(list, "an empty list")], group, LIMIT_S, config={"max_bytes": 4096, "path": None})
        return group.exchange("next", group.rank, LIMIT_S)

    assert on_all(3, work) == [[0, 1, 2]] * 3


def test_every_reason_of_every_rank_is_told_to_all_sorted_by_rank():
    def work(group):
        reasons = {0: None, 1: ["no multicast", "driver  too\nold"], 2: "no GPU"}[group.rank]
        check([needs(lambda: reasons), needs(lambda: "second" if group.rank == 1 else None, "x")], group, LIMIT_S)

    error = refused(on_all(3, work))
    assert error.reasons == {
        1: ["[device] a thing: no multicast", "[device] a thing: driver too old", "[device] x: second"],
        2: ["[device] a thing: no GPU"],
    }
    assert str(error).splitlines()[1:] == [
        "rank 1: [device] a thing: no multicast",
        "rank 1: [device] a thing: driver too old",
        "rank 1: [device] x: second",
        "rank 2: [device] a thing: no GPU",
    ]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("driver said no"), "RuntimeError: driver said no"),
        (UnsupportedError("no kernel for sm_80"), "no kernel for sm_80"),
        (KeyError("x"), "KeyError: 'x'"),
        (Unprintable(), "Unprintable"),
        (ValueError(), "ValueError"),
        (RecursionError("a" * 9999), "RecursionError: aaa"),
        (SystemExit("no licence"), "SystemExit: no licence"),
    ],
)
def test_an_exception_in_a_probe_is_a_reason_and_no_rank_skips_the_vote(error, told):
    def probe(rank):
        if rank == 1:
            raise error

    found = refused(on_all(3, lambda group: check([needs(lambda: probe(group.rank))], group, LIMIT_S)))
    assert list(found.reasons) == [1]
    assert found.reasons[1][0].startswith(f"[device] a thing: {told}")
    assert len(found.reasons[1][0]) < 600


@pytest.mark.parametrize("answer", [False, True, 0, {"a": 1}, [None], ""])
def test_an_answer_that_is_none_of_the_three_is_a_reason(answer):
    found = refused(on_all(2, lambda group: check([needs(lambda: answer)], group, LIMIT_S)))
    assert list(found.reasons) == [0, 1]
    assert "the probe" in found.reasons[0][0]


def test_ranks_that_differ_are_told_on_what():
    def work(group):
        config = {"max_bytes": 4096 << (group.rank == 2), "same": [1, {"a": 2}], "only": 1}
        if group.rank == 0:
            del config["only"]
        check([], group, LIMIT_S, config=config)

    error = refused(on_all(3, work))
    assert error.reasons == {
        0: ["max_bytes=4096", "only=no value"],
        1: ["max_bytes=4096", "only=1"],
        2: ["max_bytes=8192", "only=1"],
    }
    assert "ranks disagree on max_bytes: rank 0: 4096, rank 1: 4096, rank 2: 8192" in str(error)


def test_ranks_with_other_versions_are_told_on_which(monkeypatch):
    here = threading.local()
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.{here.rank if name == 'torch' else 0}")

    def work(group):
        here.rank = group.rank
        check([], group, LIMIT_S)

    assert "torch" in PACKAGES
    error = refused(on_all(2, work))
    assert error.reasons == {0: ["version of torch=1.0"], 1: ["version of torch=1.1"]}


def test_ranks_with_other_requirements_are_told():
    error = refused(on_all(2, lambda group: check([needs(holds, f"r{group.rank}")], group, LIMIT_S)))
    assert "ranks disagree on requirements" in str(error)


def test_an_answer_that_has_to_be_the_same_and_is_not():
    def work(group):
        check([needs(lambda: "odd" if group.rank == 1 else None, scope="same", stage="config")], group, LIMIT_S)

    assert "disagree on answer to [config] a thing: rank 0: holds, rank 1: odd" in str(refused(on_all(2, work)))


def test_stages_come_in_order_and_every_probe_runs():
    seen = []

    def probe(name):
        seen.append(name)
        return name

    listed = ["graph", "config", "weights", "device", "caches"]
    (group,) = local_groups(1)
    with pytest.raises(CapabilityError):
        check([Requirement(name, name, "rank", lambda name=name: probe(name)) for name in listed], group, LIMIT_S)
    assert seen == ["config", "device", "weights", "caches", "graph"]


def test_a_list_with_mistakes_is_refused_on_every_rank():
    twice = [needs(holds), needs(holds), Requirement("odd", "sometime", "anywhere", holds)]
    error = refused(on_all(2, lambda group: check(twice, group, LIMIT_S)))
    assert "'a thing' is listed more than once" in error.reasons[0][0]
    assert "stage 'sometime', scope 'anywhere'" in error.reasons[0][1]


def test_a_collective_probe_runs_only_once_nothing_else_stands_against_it():
    ran = []

    def work(group, reason):
        def probe():
            ran.append(group.rank)
            answers = group.exchange("probe", group.rank, LIMIT_S)
            return "too few" if group.rank == reason and len(answers) == 2 else None

        local = needs(lambda: "never" if reason is None else None)
        check([needs(probe, "peers", scope="collective"), local], group, LIMIT_S)

    assert "never" in str(refused(on_all(2, lambda group: work(group, None))))
    assert ran == []
    assert refused(on_all(2, lambda group: work(group, 1))).reasons == {1: ["[device] peers: too few"]}
    assert on_all(2, lambda group: work(group, 9)) == [None, None]


def test_a_rank_that_does_not_come_is_named_by_every_other():
    present = threading.Barrier(3)

    def work(group):
        present.wait(LIMIT_S)
        check([needs(holds)], group, 2.0)

    started = time.monotonic()
    results = on_all(4, work, ranks=(0, 1, 3))
    assert [type(result) for result in results] == [GroupError] * 3
    assert {result.missing for result in results} == {(2,)}
    assert 2.0 <= time.monotonic() - started < LIMIT_S


def test_answers_are_bounded_whatever_they_hold():
    endless = ["ä\x01" * 250] * 10_000
    big = {f"key {index}": "x" * 300 for index in range(2000)}
    error = refused(on_all(2, lambda group: check([needs(lambda: endless)], group, LIMIT_S, config=big)))
    assert error.reasons[0][-1].startswith("and 99")
    one_more = refused(on_all(2, lambda group: check([], group, LIMIT_S, config=big | {"last": group.rank})))
    items = f"{len(big) + 2 + 1 + len(PACKAGES)} items"  # the last one, what is required, and the versions
    assert f"ranks disagree on configuration: rank 0: {items}" in str(one_more)
    assert len(json.dumps(fitting(endless))) < MAX_ANSWER_BYTES // 2


def test_configuration_that_cannot_be_compared_still_reaches_the_vote():
    circular: list = []
    circular.append(circular)

    class Broken:
        def __repr__(self):
            raise RuntimeError("no repr")

    odd = {"a": circular, "b": Broken(), 3: "a name that is no text"}
    facts = facts_of([], [], odd, ())
    assert "cannot be compared" in facts["a"]
    assert "cannot be compared" in facts["b"]
    assert on_all(2, lambda group: check([], group, LIMIT_S, config=odd)) == [None, None]


def test_vote_returns_what_every_rank_got():
    assert on_all(3, lambda group: vote(group, "step", lambda: group.rank * 10, LIMIT_S)) == [[0, 10, 20]] * 3


@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
def test_vote_raises_the_same_everywhere_and_keeps_the_cause_where_it_failed(kind):
    def attempt(rank):
        if rank == 1:
            raise kind("4 GiB wanted")

    results = on_all(3, lambda group: vote(group, "allocate", lambda: attempt(group.rank), LIMIT_S))
    assert refused(results).reasons == {1: [f"{kind.__name__}: 4 GiB wanted"]}
    assert "allocate failed" in str(results[0])
    assert [type(result.__cause__) for result in results] == [type(None), kind, type(None)]


def test_somebody_who_ends_a_rank_by_hand_ends_it():
    def interrupted():
        raise KeyboardInterrupt

    (group,) = local_groups(1)
    with pytest.raises(KeyboardInterrupt):
        check([needs(interrupted)], group, LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        vote(group, "step", interrupted, LIMIT_S)


def test_features_are_the_and_over_the_ranks():
    def work(group):
        return agree({"multicast": group.rank != 1, "fabric": True, "none": False}, group, LIMIT_S)

    assert on_all(3, work) == [{"multicast": False, "fabric": True, "none": False}] * 3


def test_ranks_with_other_features_are_told():
    error = refused(on_all(2, lambda group: agree({f"f{group.rank}": True}, group, LIMIT_S)))
    assert "ranks disagree on features: rank 0: f0, rank 1: f1" in str(error)


@pytest.mark.parametrize("step", ["nvcomm.peer.device", "nvcomm.peer.ctas", "nvcomm.peer.armed", None])
def test_a_gpu_communicator_is_built_on_all_ranks_or_on_none(monkeypatch, step):
    """Each step of `build_peer` fails on rank 1 alone: the same error on both, and every mailbox is given back."""
    world = pytest.importorskip("nvcomm.collectives.world", exc_type=ImportError)
    from nvcomm.options import Options

    here = threading.local()
    open_memories, open_engines = set(), set()

    def fails(at):
        if here.rank == 1 and at == step:
            raise UsageError(f"{at} went wrong")

    class Memory:
        multicast_ptr = 0

        def __init__(self, group, *args, **options):
            open_memories.add(group.rank)

        def close(self):
            open_memories.discard(here.rank)

    class Engine:
        def __init__(self, *args, **options):
            fails("nvcomm.peer.armed")
            open_engines.add(here.rank)

        def on_close(self, call):
            self.let_go = call

        def close(self):
            open_engines.discard(here.rank)

    def device(index):
        fails("nvcomm.peer.device")
        return SimpleNamespace(uuid="0" * 32, num_sms=132)

    def most_ctas(*args):
        fails("nvcomm.peer.ctas")
        return 33

    monkeypatch.setattr(world.topology, "device", device)
    monkeypatch.setattr(world, "most_ctas", most_ctas)
    monkeypatch.setattr(world, "SymmetricMemory", Memory)
    monkeypatch.setattr(world, "DeviceEngine", Engine)
    monkeypatch.setattr(world, "refuse_capture", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def work(group):
        here.rank = group.rank
        return world.build_peer(group, torch.device("cuda", 0), Options(timeout_s=LIMIT_S))

    results = on_all(2, work)
    if step is None:
        assert [type(result) for result in results] == [Engine, Engine]
        assert open_memories == open_engines == {0, 1}
        for engine in results:
            engine.let_go()
        return
    assert refused(results).reasons == {1: [f"{step} went wrong"]}
    assert open_memories == open_engines == set()
