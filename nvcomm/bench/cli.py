# SPDX-License-Identifier: Apache-2.0
"""`nvcomm bench OP --world W --ranks N`: parse, start the ranks or join those of a launcher, measure, report."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcomm.bench.plan import DEFAULT_RANKS, Plan, parse
from nvcomm.bench.report import EXIT_HANG, EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE, EXIT_WRONG, Report
from nvcomm.env import other
from nvcomm.errors import CapabilityError, GroupError, PeerTimeoutError, UnsupportedError, UsageError
from nvcomm.exits import EXIT_INTERRUPTED, no_reader

if TYPE_CHECKING:
    import torch

    from nvcomm.bench.result import Result
    from nvcomm.group import StoreGroup


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns 0, 1 (wrong data, or slower than the floor), 2 (usage), 77 (unsupported) or 124 (a hang)."""
    typed = list(sys.argv[1:] if argv is None else argv)
    plan = parse(typed)
    if plan.plot is not None and importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("nvcomm bench: --plot needs matplotlib: pip install 'nvcomm[bench]'\n")
        return EXIT_UNSUPPORTED
    why_not = _unwritable(plan)  # before anything is measured
    if why_not is not None:
        sys.stderr.write(f"nvcomm bench: {why_not}\n")
        return EXIT_USAGE
    if plan.world == "virtual":
        return _guarded("nvcomm bench", lambda: _virtual(plan, typed))
    if _launched():
        return _joined(plan, typed)
    from nvcomm.bench.spawn import run_ranks

    return run_ranks(_spawned, plan.ranks or DEFAULT_RANKS, plan.timeout_s, plan, typed)


def _unwritable(plan: Plan) -> str | None:
    """Which of the files could not be written in the end, and why; or None."""
    for path in (plan.json, plan.csv, plan.markdown, plan.plot):
        if path is None or path == "-":
            continue
        file = Path(path)
        if not file.resolve().parent.is_dir():
            return f"{path} cannot be written: its folder is not there"
        if file.is_dir() or not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
            return f"{path} cannot be written: it is a folder, or not yours to write"
    if plan.plot is not None:
        from nvcomm.bench.plot import formats

        if Path(plan.plot).suffix[1:].lower() not in formats():
            return f"--plot {plan.plot}: its ending is no format; wanted one of {', '.join(formats())}"
    return None


def _launched() -> bool:
    """Whether a launcher started this process. Where it plainly did not, torch is not imported to find out."""
    if not any(other(name) for name in ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        return False
    from nvcomm.group import started_by

    return started_by() is not None


def _virtual(plan: Plan, argv: list[str]) -> int:
    import torch

    from nvcomm.bench.graphs import measure_virtual

    with _watchdog(plan.timeout_s):
        results = measure_virtual(plan)
        first = next(results)  # before the table begins: a machine without a GPU has none
        report = Report(plan, argv, first.case.world_size, torch.cuda.get_device_name())
        report.add(first)
        return _collect(report, results)


def _joined(plan: Plan, argv: list[str]) -> int:
    """One rank of a launcher."""
    from nvcomm.launch import launched

    with launched(plan.timeout_s) as (group, device):

        def work() -> int:
            if plan.ranks not in (None, group.world_size):
                raise UsageError(f"--ranks {plan.ranks}: the launcher started {group.world_size}; leave --ranks out.")
            return _rank(plan, argv, group, device)

        code = _guarded(f"[rank {group.rank}] nvcomm bench", work)
        if code not in (EXIT_OK, EXIT_WRONG):
            raise SystemExit(code)  # which ends the other ranks too
        return code


def _spawned(rank: int, world_size: int, store: str, plan: Plan, argv: list[str]) -> None:
    """One rank of this command's own; ends its process."""
    import torch
    import torch.distributed as dist

    from nvcomm.group import StoreGroup

    def work() -> int:
        group = StoreGroup(dist.FileStore(store, world_size), rank, world_size, "bench")
        device = torch.device("cpu")
        if plan.world == "peer" and torch.cuda.is_available():
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return _rank(plan, argv, group, device)

    sys.exit(_guarded(f"[rank {rank}] nvcomm bench", work))


def _rank(plan: Plan, argv: list[str], group: StoreGroup, device: torch.device) -> int:
    import torch

    from nvcomm.bench.rank import measure

    if plan.world == "host":
        device = torch.device("cpu")
        # Each rank has a core at most: torch's own threads would only take it from another rank.
        torch.set_num_threads(1)
    elif device.type != "cuda":
        raise UnsupportedError("the peer world needs a CUDA GPU, and torch sees none: `nvcomm doctor` says why.")
    with _watchdog(plan.timeout_s):
        results = measure(plan, group, device)
        if group.rank:
            for _ in results:
                pass
            return EXIT_OK
        where = _processor() if plan.world == "host" else torch.cuda.get_device_name(device)
        return _collect(Report(plan, argv, group.world_size, where), results)


def _collect(report: Report, results: Iterable[Result]) -> int:
    for result in results:
        report.add(result)
    return report.finish()


def _processor() -> str:
    from nvcomm.doctor_system import cpu_name

    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


@contextlib.contextmanager
def _watchdog(timeout_s: float) -> Iterator[None]:
    """Ends the process if the block is not done in time, whatever it waits for."""

    def end() -> None:
        sys.stderr.write(f"nvcomm bench: not done after {timeout_s:g} s: ended (--timeout)\n")
        sys.stderr.flush()
        os._exit(EXIT_HANG)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _guarded(who: str, work: Callable[[], int]) -> int:
    try:
        return work()
    except (UnsupportedError, CapabilityError, ImportError) as error:
        return _refused(who, error, EXIT_UNSUPPORTED)
    except UsageError as error:
        return _refused(who, error, EXIT_USAGE)
    except (PeerTimeoutError, GroupError) as error:
        return _refused(who, error, EXIT_HANG)
    except BrokenPipeError:
        return no_reader()
    except OSError as error:  # a file that cannot be written
        return _refused(who, error, EXIT_USAGE)
    except KeyboardInterrupt:  # the terminal tells every rank, and the command says it once
        return EXIT_INTERRUPTED


def _refused(who: str, error: Any, code: int) -> int:
    sys.stderr.write(f"{who}: {type(error).__name__}: {error}\n")
    return code
