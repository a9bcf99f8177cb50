# SPDX-License-Identifier: Apache-2.0
"""The collectives for CPU tensors: the same protocol between processes, or threads, over shared memory."""

from nvcomm.host.connect import local_engines, open_memory
from nvcomm.host.engine import HostEngine

__all__ = ["HostEngine", "local_engines", "open_memory"]
