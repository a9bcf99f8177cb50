# SPDX-License-Identifier: Apache-2.0
"""Collectives for the decode step of large language models.

Public names load on first use: `import nvcomm` needs neither CUDA nor torch, so that `python -m nvcomm list` and the
error types work on any machine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nvcomm._version import __version__

if TYPE_CHECKING:
    from nvcomm.communicator import Communicator as Communicator
    from nvcomm.env import Settings as Settings
    from nvcomm.env import settings as settings
    from nvcomm.errors import CapabilityError as CapabilityError
    from nvcomm.errors import CollectiveMismatchError as CollectiveMismatchError
    from nvcomm.errors import CudaError as CudaError
    from nvcomm.errors import GroupError as GroupError
    from nvcomm.errors import NvcommError as NvcommError
    from nvcomm.errors import PeerTimeoutError as PeerTimeoutError
    from nvcomm.errors import UnsupportedError as UnsupportedError
    from nvcomm.errors import UsageError as UsageError
    from nvcomm.virtual import virtual_world as virtual_world

# Public name -> the module that defines it.
_HOME = {
    "CapabilityError": "nvcomm.errors",
    "CollectiveMismatchError": "nvcomm.errors",
    "Communicator": "nvcomm.communicator",
    "CudaError": "nvcomm.errors",
    "GroupError": "nvcomm.errors",
    "NvcommError": "nvcomm.errors",
    "PeerTimeoutError": "nvcomm.errors",
    "Settings": "nvcomm.env",
    "UnsupportedError": "nvcomm.errors",
    "UsageError": "nvcomm.errors",
    "settings": "nvcomm.env",
    "virtual_world": "nvcomm.virtual",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nvcomm' has no attribute {name!r}; its public names are {', '.join(_HOME)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
