# SPDX-License-Identifier: Apache-2.0
"""Every virtual world of these tests is audited when it is closed."""

from __future__ import annotations

import pytest

from tests.audit import audited


@pytest.fixture(scope="session", autouse=True)
def every_world_is_audited():
    """For worlds of any scope."""
    from nvcomm.virtual import VirtualWorld

    patch = pytest.MonkeyPatch()
    patch.setattr(VirtualWorld, "close", audited(VirtualWorld.close))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def the_kernel_that_makes_a_rank_late_is_loaded():
    """A first launch loads it, which waits for the device, where another rank may already wait for this one (R9)."""
    import torch

    if torch.cuda.is_available():
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
