# SPDX-License-Identifier: Apache-2.0
"""How many CTAs a rank may launch so that nobody starves (docs/mailbox.md R8).

A CTA that spins holds its place on a multiprocessor until its peers' CTAs have published, so all CTAs of all ranks on
a device must be resident at once. With an early trigger the next call's CTAs wait on the device too, and hold places
beside those of this call: twice as many. One place stays free for a publisher, whose words the spinning ones may wait
for. The agents of the delayed transport spin as well, each on half of a multiprocessor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from nvcomm.errors import UsageError

# Shares are sums of decimal fractions: 0.1 ten times is a little less or more than 1.
_ROUNDING = 1e-9


def ctas_per_rank(
    *, num_sms: int, ctas_per_sm: int, ranks_on_device: int, early_trigger: bool, device_share: float, agents: int = 0
) -> int:
    """CTAs that one rank may have in one launch.

    Args:
        num_sms: multiprocessors of the device (of this process's share of it, under MPS).
        ctas_per_sm: CTAs of the kernel that fit one multiprocessor.
        ranks_on_device: ranks of this communicator on the device.
        early_trigger: the next call's CTAs may be waiting beside this call's.
        device_share: fraction of the places that this communicator may hold, 0 < device_share <= 1. The shares of
            all communicators on a device that run at once must not add up to more than 1.
        agents: CTAs of the delayed transport (tests, stress), each as large as half of what a multiprocessor holds.

    Raises:
        UsageError: not one CTA a rank fits.
    """
    if not 0 < device_share <= 1:
        raise UsageError(f"device_share is {device_share}; wanted: above 0 and at most 1.")
    places = int(num_sms * ctas_per_sm * device_share) - 1
    if agents:
        half = -(-ctas_per_sm // 2)
        # Wherever the calls' CTAs lie: `ctas_per_sm - half + 1` of them keep an agent off a multiprocessor, and of each
        # `half` that are missing there is room for one.
        places = min(places, num_sms * (ctas_per_sm - half + 1)) - half * agents
    grids = ranks_on_device * (2 if early_trigger else 1)
    if places < grids:
        raise UsageError(
            f"{ranks_on_device} ranks on one device of {num_sms} multiprocessors need {grids} resident CTAs and a "
            f"device_share of {device_share} holds {places}. Raise device_share, use fewer ranks, or pdl='safe'."
        )
    return places // grids


class Claims:
    """Which communicators of this process hold a share of which device, until they let go of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: dict[str, dict[str, float]] = {}

    def held(self, uuid: str) -> dict[str, float]:
        """Communicator -> its share of the device `uuid`."""
        with self._lock:
            return dict(self._shares.get(uuid, {}))

    def hold(self, uuid: str, communicator: str, share: float) -> None:
        """Takes a share; whether it fits is for `refusal` to say first."""
        with self._lock:
            self._shares.setdefault(uuid, {})[communicator] = share

    def let_go(self, uuid: str, communicator: str) -> None:
        """Gives a share back; harmless when called twice."""
        with self._lock:
            self._shares.get(uuid, {}).pop(communicator, None)


# A device is shared by all communicators of a process, whoever built them: one register, like the device itself.
CLAIMS = Claims()


def refusal(uuid: str, held: Iterable[Mapping[str, float]], share: float) -> str | None:
    """Why one more communicator may not hold `share` of a device, or None.

    Args:
        uuid: the device.
        held: what each process on it holds: communicator -> share. One communicator may be in several of them.
        share: what the new one asks for.
    """
    shares: dict[str, float] = {}
    for claims in held:
        shares.update(claims)
    total = sum(shares.values())
    if total + share <= 1 + _ROUNDING:
        return None
    return (
        f"{len(shares)} communicators hold {total:g} of GPU {uuid}, and one more asks for {share:g}: together more "
        "than all of it, and ranks that wait could keep out the ones that they wait for. Close one, or build them "
        "with a smaller device_share."
    )
