# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m stress`."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from stress import oracle
from stress.run import OPS, ProtocolName, Transport

DEFAULT_DURATION_S = 45.0
DEFAULT_TIMEOUT_S = 10.0

EPILOG = """\
exit codes: 0 proven; 1 wrong words, the first one is decoded, or counts or mailboxes that are not as they have to be,
or an error that ended the run; 2 usage; 3 unproven: nothing was wrong, but the negative control did not fail, or took
more replays than the run had; 77 this machine cannot do it; 124 a rank waited in vain, the report names for whom;
130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments; `replays` and `duration_s` are None where not given and not needed."""

    world: str
    transport: Transport
    ranks: int
    replays: int | None
    duration_s: float | None
    seed: int
    protocol: ProtocolName
    control: bool
    op: str
    timeout_s: float
    pdl: str
    json: str | None


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parses; ends the process with 2 on a usage error, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m stress",
        description="Replays graphs of three back-to-back gathers of changing sizes and checks every word. "
        "Without arguments: about a minute, on the GPU where there is one, else between CPU processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--world",
        choices=("auto", "host", "virtual", "peer"),
        default="auto",
        help="host: CPU processes. virtual: all ranks on this GPU. peer: one process a rank, started by torchrun",
    )
    parser.add_argument(
        "--transport",
        choices=get_args(Transport),
        default="auto",
        help="peer: a store per rank. delayed: copies land late and in any order",
    )
    parser.add_argument("--ranks", type=_between(1, oracle.MAX_RANKS), default=None, metavar="N", help="default 4")
    parser.add_argument("--replays", type=_between(1, oracle.MAX_REPLAYS), metavar="N", help="stop after N replays")
    parser.add_argument(
        "--duration",
        type=_seconds,
        metavar="SECONDS",
        help=f"stop after so many seconds of replays, and after {oracle.MAX_REPLAYS:,} replays in any case",
    )
    parser.add_argument("--seed", type=_between(0, (1 << 64) - 1), metavar="S", help="default: a random one, printed")
    parser.add_argument("--protocol", choices=get_args(ProtocolName), default="mailbox", help="late-copy is wrong")
    parser.add_argument(
        "--control",
        choices=("late-copy", "none"),
        default=None,
        help="the negative control that runs first (default late-copy); without it nothing is proven",
    )
    parser.add_argument("--op", choices=OPS, default=OPS[0], help="the collective")
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="bound of every wait"
    )
    parser.add_argument(
        "--pdl",
        choices=("safe", "off", "early"),
        default="safe",
        help="how GPU kernels follow each other (programmatic dependent launch)",
    )
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - is standard output")
    given = parser.parse_args(argv)
    if given.world == "host" and given.transport == "multicast":
        parser.error("--transport multicast needs --world peer: host ranks share no NVSwitch")
    if given.world == "virtual" and given.transport == "multicast":
        parser.error("--transport multicast needs --world peer: the ranks of a virtual world share one GPU")
    duration = given.duration
    if given.replays is None and duration is None:
        duration = DEFAULT_DURATION_S
    # The known-bad protocol is its own control.
    control = given.control or ("none" if given.protocol == "late-copy" else "late-copy")
    return Options(
        world=given.world,
        transport=given.transport,
        ranks=given.ranks or 0,
        replays=given.replays,
        duration_s=duration,
        seed=secrets.randbits(32) if given.seed is None else given.seed,
        protocol=given.protocol,
        control=control == "late-copy",
        op=given.op,
        timeout_s=given.timeout,
        pdl=given.pdl,
        json=given.json,
    )


def _between(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text, 0)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is outside {low} .. {high}")
        return value

    return integer


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= 1e6):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value
