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
