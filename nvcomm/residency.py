# SPDX-License-Identifier: Apache-2.0
"""How many CTAs a rank may launch so that nobody starves (docs/mailbox.md R8). Pure arithmetic.

A CTA that spins holds its place on a multiprocessor until its peers' CTAs have published, so all CTAs of all ranks on
a device must be resident at once. With an early trigger the next call's CTAs wait on the device too, and hold places
beside those of this call: twice as many.
"""

from __future__ import annotations

from nvcomm.errors import UsageError


def ctas_per_rank(
    *, num_sms: int, ctas_per_sm: int, ranks_on_device: int, early_trigger: bool, device_share: float
) -> int:
    """CTAs that one rank may have in one launch.

    Args:
        num_sms: multiprocessors of the device (of this process's share of it, under MPS).
        ctas_per_sm: CTAs of the kernel that fit one multiprocessor.
        ranks_on_device: ranks of this communicator on the device.
        early_trigger: the next call's CTAs may be waiting beside this call's.
        device_share: fraction of the places that this communicator may hold, 0 < device_share <= 1. The shares of
            all communicators on a device that run at once must not add up to more than 1.

    Raises:
        UsageError: not one CTA a rank fits.
    """
    if not 0 < device_share <= 1:
        raise UsageError(f"device_share is {device_share}; wanted: above 0 and at most 1.")
    places = int(num_sms * ctas_per_sm * device_share)
    grids = ranks_on_device * (2 if early_trigger else 1)
    if places < grids:
        raise UsageError(
            f"{ranks_on_device} ranks on one device of {num_sms} multiprocessors need {grids} resident CTAs and a "
            f"device_share of {device_share} holds {places}. Raise device_share, use fewer ranks, or pdl='safe'."
        )
    return places // grids
