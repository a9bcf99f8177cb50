# SPDX-License-Identifier: Apache-2.0
"""`python -m stress`: the control first, then the run, then the verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from nvcomm import topology
from nvcomm.env import other, settings
from nvcomm.errors import CapabilityError, NvcommError, UnsupportedError, UsageError
from stress import machine, report
from stress.bar import ProgressBar
from stress.cli import Options, parse
from stress.control import Control, run_control
from stress.run import Outcome, Progress, RunConfig, Runner, World


def main(argv: Sequence[str] | None = None) -> int:
    """Runs; returns the exit code that the help text lists."""
    options = parse(argv)
    if other("RANK") is None:
        # Virtual ranks wait for each other, so each stream needs its own hardware queue; CUDA reads this when it
        # starts. A rank of its own needs no more than usual, and four MPS clients with 32 each get no contexts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    console = Console(stderr=True)
    try:
        config = _configure(options)
        controls: list[Control] = []  # none, or the one that ran: a watchdog reports it too
        runner = _runner(options, config, console, controls)
        try:
            return _run(options, runner.agreed(config), runner, console, controls)
        finally:
            runner.close()
    except (UnsupportedError, CapabilityError) as error:
        console.print(f"unsupported: {error}", style="yellow", highlight=False, soft_wrap=True)
        return report.EXIT_UNSUPPORTED
    except UsageError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return report.EXIT_USAGE
    except NvcommError as error:
        console.print(f"failed: {error}", style="red", highlight=False, soft_wrap=True)
        return report.EXIT_BAD


def _run(options: Options, config: RunConfig, runner: Runner, console: Console, controls: list[Control]) -> int:
    if not runner.reports:
        console = Console(stderr=True, quiet=True)
    elif options.json:
        report.begin_json(options.json)
    if options.control:
        with ProgressBar(console, "control: late-copy", config.but(replays=None, duration_s=None)) as bar:
            controls.append(run_control(runner, config, Progress(bar.show)))
    with ProgressBar(console, f"{config.protocol}, {config.world} world", config) as bar:
        outcome = runner.run(config, Progress(bar.show))
    return _finish(options, config, outcome, controls, console, reports=runner.reports)


def _finish(
    options: Options, config: RunConfig, outcome: Outcome, controls: list[Control], console: Console, *, reports: bool
) -> int:
    gpu_index = None if config.world == "host" else _number("LOCAL_RANK", 0)
    control = controls[-1] if controls else None
    result = report.Report(config, outcome, control, machine.describe(gpu_index=gpu_index))
    if reports:
        report.show(result, console)
        if options.json:
            report.write_json(result, options.json)
    return result.exit_code


def _configure(options: Options) -> RunConfig:
    settings()  # a variable that cannot be understood is told here, once, and not by every rank
    under_torchrun = other("RANK") is not None and other("WORLD_SIZE") is not None
    world = _world(options.world, under_torchrun=under_torchrun)
    if world != "peer" and under_torchrun:
        raise UsageError(f"--world {world} starts its own ranks: run it without torchrun, or use --world peer.")
    ranks = options.ranks or (_number("WORLD_SIZE", 4) if world == "peer" else 4)
    return RunConfig(
        world=world,
        transport=options.transport,
        protocol=options.protocol,
        op=options.op,
        ranks=ranks,
        seed=options.seed,
        replays=options.replays,
        duration_s=options.duration_s,
        timeout_s=options.timeout_s,
        pdl=options.pdl,
    )


def _world(asked: str, *, under_torchrun: bool) -> World:
    if asked != "auto":
        return asked  # type: ignore[return-value]
    found = topology.devices()
    if isinstance(found, topology.Unknown) or not found:
        return "host"
    return "peer" if under_torchrun else "virtual"


def _runner(options: Options, config: RunConfig, console: Console, controls: list[Control]) -> Runner:
    if config.world == "host":
        from stress.replay_host import HostRunner

        return HostRunner()
    try:
        from stress import gpu_runners
    except ImportError as error:
        raise UnsupportedError(
            f"the GPU worlds need the CUDA packages ({error}): pip install 'nvcomm[cu13]'"
        ) from error
    device = gpu_runners.device_of(_number("LOCAL_RANK", 0))

    def on_hang(hung: RunConfig, outcome: Outcome) -> int:
        return _finish(options, hung, outcome, controls, console, reports=True)

    if config.world == "virtual":
        return gpu_runners.VirtualRunner(device, on_hang)
    return gpu_runners.PeerRunner(device, on_hang)


def _number(name: str, default: int) -> int:
    """What a launcher's variable says; raises UsageError where that is no number."""
    text = other(name)
    if text is None or text.isdecimal():
        return default if text is None else int(text)
    raise UsageError(f"{name}={text!r} is no number, as torchrun sets it: start the ranks with torchrun, or unset it.")


if __name__ == "__main__":
    from nvcomm.__main__ import main as nvcomm  # ends without a traceback where it is interrupted, or nobody reads

    sys.exit(nvcomm(["stress", *sys.argv[1:]]))
