# SPDX-License-Identifier: Apache-2.0
"""The faults of the host world: a process per rank, so that one can be stopped or killed in mid-collective."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from nvcomm.communicator import Communicator
from nvcomm.errors import GroupError, NvcommError
from nvcomm.group import StoreGroup
from stress.fault_common import EVERY_RANK, FIRST, GOES_ON, TIMED_OUT, WORDS, disagreements, wraps
from stress.fault_scene import LIMIT_S, TIMEOUT_S, Scene, SignallingTransport
from stress.fault_table import (
    AS_BEFORE,
    CALLS_BEFORE,
    MORE_WORDS,
    NEW_GROUP,
    ODD_RANK,
    RANKS,
    RESET,
    SUCCESS,
    UNDEFINED,
    Fault,
    Row,
    Sight,
    row_of,
    sight_of,
)

RESET_S = 5.0  # how long survivors wait for a rank that is gone, once they have met
ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1


Work = Callable[[Scene], None]


def never_arrives(scene: Scene) -> None:
    if not scene.odd:
        scene.gather_in_vain()


def signals_itself(number: signal.Signals, *, in_time: bool = False) -> Work:
    """Before a call; `in_time`: it goes on before the others give up."""

    def work(scene: Scene) -> None:
        if scene.odd:
            os.kill(os.getpid(), number)
        if scene.odd or in_time:
            scene.gather()
        else:
            scene.gather_in_vain()

    return work


def signals_itself_between_stores(number: signal.Signals) -> Work:
    """In mid-collective: the odd rank's words have reached rank 0 alone."""

    def work(scene: Scene) -> None:
        if scene.odd:
            scene.port.transport = SignallingTransport(number)
        if scene.comm.rank == 0 or scene.odd:
            scene.gather()
        scene.gather_in_vain()

    return work


def one_call_fewer(scene: Scene) -> None:
    for _ in range(2):
        scene.gather()
    never_arrives(scene)


def raises_between_calls(scene: Scene) -> None:
    with contextlib.suppress(ArithmeticError):
        if scene.odd:
            raise ArithmeticError("raised between two calls")
        scene.gather_in_vain()


def leaves_between_calls(scene: Scene) -> None:
    """An exception that nobody catches ends the process, through every `with` and `finally` of it."""
    if scene.odd:
        scene.comm.close()
        os._exit(0)
    scene.gather_in_vain()


def interrupted(scene: Scene) -> None:
    """Ctrl-C while it waits for the others, which come when that has happened."""
    if scene.odd:
        waits = scene.when_it_waits()

        def interrupt() -> None:
            waits.wait(LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with contextlib.suppress(KeyboardInterrupt):
            scene.gather()
    scene.group.barrier("interrupted", LIMIT_S)
    if not scene.odd:
        scene.gather()  # its words are there
        scene.gather_in_vain()


def other_tensor(x: torch.Tensor) -> Work:
    """The odd rank gathers `x`."""

    def work(scene: Scene) -> None:
        scene.gather(x if scene.odd else None)

    return work


def other_operation(scene: Scene) -> None:
    if scene.odd:
        scene.comm.all_reduce(torch.ones(WORDS))
    else:
        scene.gather()


def overlapping_threads(scene: Scene) -> None:
    """Another thread of rank 0 calls while the first waits for the others, and is refused without harm."""
    if scene.comm.rank != 0:
        scene.group.barrier("refused", LIMIT_S)
        scene.gather()
        return
    waits = scene.when_it_waits()
    caller = threading.Thread(target=scene.gather)
    caller.start()
    waits.wait(LIMIT_S)
    try:
        scene.gather()
    finally:
        scene.group.barrier("refused", LIMIT_S)
        caller.join()


def many_calls(scene: Scene) -> None:
    for _ in range(5):
        scene.gather()


FAULTS: tuple[Fault[Work], ...] = (
    Fault("never arrives", TIMED_OUT, never_arrives),
    Fault("makes one call fewer", replace(TIMED_OUT, places=((CALLS_BEFORE + 2, 1),)), one_call_fewer),
    Fault("raises between two calls", TIMED_OUT, raises_between_calls),
    Fault("ends its program between two calls", replace(TIMED_OUT, then=NEW_GROUP), leaves_between_calls, lost=True),
    Fault(
        "is stopped (SIGSTOP) and continued in time",
        GOES_ON, signals_itself(signal.SIGSTOP, in_time=True), EVERY_RANK,
    ),
    Fault(
        "is stopped (SIGSTOP) for longer than the timeout",
        TIMED_OUT, signals_itself(signal.SIGSTOP), continued_after_s=1.4 * TIMEOUT_S,
    ),
    Fault(
        "is stopped in mid-collective for longer than the timeout",
        replace(TIMED_OUT, places=(FIRST, (CALLS_BEFORE + 1, 0))),
        signals_itself_between_stores(signal.SIGSTOP), continued_after_s=1.4 * TIMEOUT_S,
    ),
    Fault(
        "is killed (SIGKILL) between two calls",
        replace(TIMED_OUT, then=NEW_GROUP), signals_itself(signal.SIGKILL), lost=True,
    ),
    Fault(
        "is killed (SIGKILL) in mid-collective",
        replace(TIMED_OUT, places=(FIRST, (CALLS_BEFORE + 1, 0)), then=NEW_GROUP),
        signals_itself_between_stores(signal.SIGKILL), lost=True,
    ),
    Fault(
        "is interrupted (SIGINT) in mid-collective",
        replace(TIMED_OUT, places=((CALLS_BEFORE + 1, 0),)), interrupted,
    ),
    *disagreements(other_tensor, other_operation),
    Fault("calls from two threads at once", replace(GOES_ON, result="UsageError"), overlapping_threads, (0,)),
    *wraps(many_calls, never_arrives),
)  # fmt: skip


def run(fault: Fault[Work]) -> Row:
    """Runs one fault between processes of its own; again where it was only too late, as on a busy machine."""
    for _ in range(ATTEMPTS):
        row = _run_once(fault)
        if not row.only_late:
            break
    return row


def _run_once(fault: Fault[Work]) -> Row:
    with tempfile.TemporaryDirectory(prefix="nvcomm-faults-") as folder:
        context = multiprocessing.get_context("fork")
        checks = {"NVCOMM_DEVICE_CHECKS": str(int(fault.device_checks))}
        with mock.patch.dict(os.environ, checks):
            ranks = [context.Process(target=_rank, args=(fault, rank, Path(folder))) for rank in EVERY_RANK]
            for process in ranks:
                process.start()
        _wait(ranks, fault, Path(folder))
        sights = [_sight(Path(folder) / f"rank{rank}.json", process) for rank, process in enumerate(ranks)]
    if fault.lost:  # nobody expects anything of it
        sights[ODD_RANK] = Sight()
    return row_of(fault, sights, TIMEOUT_S)


def _wait(ranks: Sequence[BaseProcess], fault: Fault[Work], folder: Path) -> None:
    """Waits for the ranks to end; lets one that is stopped go on after a while, and after the others, if they end."""
    seen = [] if fault.expected.result == SUCCESS else [_over(folder, rank) for rank in fault.watched]
    deadline = time.monotonic() + LIMIT_S
    stopped_since: dict[int, float] = {}
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        for process in ranks:
            assert process.pid is not None
            if process.is_alive() and _is_stopped(process.pid):
                since = stopped_since.setdefault(process.pid, time.monotonic())
                if time.monotonic() - since > fault.continued_after_s and all(path.exists() for path in seen):
                    os.kill(process.pid, signal.SIGCONT)
                    stopped_since.clear()
        time.sleep(0.01)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def _over(folder: Path, rank: int) -> Path:
    """Exists once the fault is over for a rank."""
    return folder / f"rank{rank}.over"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _sight(path: Path, process: BaseProcess) -> Sight:
    if not path.exists():
        return Sight(problem=f"it left nothing behind, exit code {process.exitcode}")
    fields = json.loads(path.read_text())
    fields["places"] = tuple(tuple(place) for place in fields["places"])
    return Sight(**fields)


def _rank(fault: Fault[Work], rank: int, folder: Path) -> None:
    """A rank's whole life, in its own process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank survives its parent
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sight = _live(fault, rank, folder)
    except BaseException:  # the parent reports it
        sight = Sight(problem=traceback.format_exc(limit=3).replace("\n", " / "))
    (folder / f"rank{rank}.tmp").write_text(json.dumps(asdict(sight)))
    (folder / f"rank{rank}.tmp").rename(folder / f"rank{rank}.json")
    os._exit(0)


def _live(fault: Fault[Work], rank: int, folder: Path) -> Sight:
    store = dist.FileStore(str(folder / "store"), RANKS)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    group = StoreGroup(store, rank, RANKS, "faults")
    scene = Scene(group, fault.generation)
    with scene.comm, scene.comm.watch(scene.reported.append, 0.02):
        for _ in range(CALLS_BEFORE):
            scene.gather()
        group.barrier("before", LIMIT_S)
        started = time.monotonic()
        error: NvcommError | None = None
        try:
            with scene.short_waits() if fault.expected.result == UNDEFINED else contextlib.nullcontext():
                fault.work(scene)
        except NvcommError as caught:
            error = caught
        sight = sight_of(error, time.monotonic() - started)
        _over(folder, rank).touch()
        broken = scene.comm.engine.fault()
        deadline = time.monotonic() + LIMIT_S
        while broken and not scene.reported and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for one report too many
        told = [str(one) for one in scene.reported]
        if told != ([] if broken is None else [str(broken)]):
            return replace(sight, problem=f"its watcher was told {told}; it broke by {broken!r}")
        then, problem = _without(scene, store) if fault.lost else _go_on(scene)
    return replace(sight, then=then, problem=problem)


def _go_on(scene: Scene) -> tuple[str, str]:
    """Brings the ranks together, compares `MORE_WORDS` words, audits; what had to be done, and what was wrong."""
    comm, group = scene.comm, scene.group
    audit = comm.audit()
    places = group.exchange("place", [str(comm.engine.fault() or ""), asdict(audit)], LIMIT_S)
    healthy = all(place == ["", asdict(audit)] for place in places) and not audit.dirty_words
    if not healthy:
        comm.reset()
    return (AS_BEFORE if healthy else RESET), _more_words(comm, group)


def _without(scene: Scene, store: dist.Store) -> tuple[str, str]:
    """A rank is gone: `reset()` has to say so, and the others go on."""
    survivors = [rank for rank in EVERY_RANK if rank != ODD_RANK]
    group = StoreGroup(store, survivors.index(scene.comm.rank), len(survivors), "survivors")
    group.barrier("a rank is gone", LIMIT_S)
    scene.port.timeout_s = RESET_S / 2  # reset() waits twice as long
    try:
        scene.comm.reset()
    except GroupError as error:
        if error.missing != (ODD_RANK,):
            return "", f"reset() misses {error.missing}"
    else:
        return "", "reset() succeeded without a rank"
    with Communicator(group, "cpu", timeout_s=LIMIT_S) as comm:
        return NEW_GROUP, _more_words(comm, group)


def _more_words(comm: Communicator, group: StoreGroup) -> str:
    compared = 0
    for call, size in enumerate(_sizes()):
        index = torch.arange(size, dtype=torch.int32)
        want = torch.stack([index * 8 + rank + (call << 24) for rank in range(comm.world_size)])
        if wrong := int((comm.all_gather(want[comm.rank].clone()) != want).sum()):
            return f"{wrong} wrong words in gather {call} afterwards"
        compared += want.numel()
        if compared >= MORE_WORDS:
            break
    group.barrier("after", LIMIT_S)
    mine = asdict(comm.audit())
    audits = group.exchange("audit", mine, LIMIT_S)
    clean = all(audit == mine for audit in audits) and not mine["dirty_words"]
    return "" if clean else f"mailboxes afterwards: {audits}"


def _sizes() -> Iterator[int]:
    while True:
        yield from (4096, 60_000, 1, 1 << 17)
