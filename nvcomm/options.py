# SPDX-License-Identifier: Apache-2.0
"""What the builder of a communicator chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nvcomm.errors import UsageError
from nvcomm.mailbox import GENERATION_MASK, MAX_WORLD_SIZE

Pdl = Literal["off", "safe", "early"]
Transport = Literal["auto", "peer", "multicast", "delayed"]
Protocol = Literal["mailbox", "late-copy", "copy"]
DEFAULT_MAX_BYTES = 4 << 20
_MOST_BYTES = 1 << 30
_MOST_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Options:
    """Choices that hold for the life of a communicator, the same on every rank unless said otherwise.

    Attributes:
        max_bytes: most bytes that a rank contributes to a call.
        timeout_s: bound of every wait; may differ between ranks.
        pdl: how GPU kernels follow each other (programmatic dependent launch). "off": plain launches. "safe": the
            next kernel may be scheduled after this one's last store (R1 ii). "early": right after this one's wait
            (R1 iii); the caller promises that whatever kernel follows a collective on its stream waits for it, by
            griddepcontrol.wait or a plain launch, on every path.
        device_share: fraction of the GPU's resident threads that this communicator may hold (R8). The shares of all
            communicators that run at once on a device must not add up to more than 1.
        generation: where the count of collectives starts; for tests of its wrap.
        protocol: two that are wrong: with "late-copy" gathers run the negative control of tests and stress, with "copy"
            reductions wait for nobody, the floor of benchmarks.
        transport: how a publish reaches the others: "peer", a store for each; "multicast", one for all; "auto",
            multicast where every rank has it; "delayed", by an agent, late and in any order (tests and stress).
        seed: of the delays.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    timeout_s: float = 30.0
    pdl: Pdl = "safe"
    device_share: float = 0.5
    generation: int = 0
    protocol: Protocol = "mailbox"
    transport: Transport = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for a value that cannot work."""
        wanted = {
            "max_bytes": (is_count(self.max_bytes, 16, _MOST_BYTES), f"a whole number from 16 to {_MOST_BYTES}"),
            "timeout_s": (_is_number(self.timeout_s) and 0 < self.timeout_s < 1e6, "seconds above 0 and below 1e6"),
            "pdl": (self.pdl in ("off", "safe", "early"), "'off', 'safe' or 'early'"),
            "device_share": (
                _is_number(self.device_share) and 0 < self.device_share <= 1,
                "a number above 0 and at most 1",
            ),
            "generation": (is_count(self.generation, 0, GENERATION_MASK), "an unsigned 32-bit count"),
            "seed": (is_count(self.seed, 0, _MOST_SEED), "a whole number from 0 to 2**64 - 1"),
            "transport": (self.transport in get_args(Transport), f"one of {get_args(Transport)}"),
            "protocol": (self.protocol in get_args(Protocol), f"one of {get_args(Protocol)}"),
        }
        for name, (good, range_) in wanted.items():
            if not good:
                raise UsageError(f"{name} is {getattr(self, name)!r}; wanted: {range_}.")


def check_world_size(world_size: int) -> None:
    """Raises UsageError unless there are kernels for `world_size` ranks."""
    if not is_count(world_size, 1, MAX_WORLD_SIZE):
        raise UsageError(f"the group has {world_size!r} ranks; wanted: 1 to {MAX_WORLD_SIZE}.")


def is_count(value: object, least: int, most: int) -> bool:
    """Whether `value` is a whole number from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
