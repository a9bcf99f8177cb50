# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other and tell each other things: bounded JSON through a key-value store, never unpickled.

Only a `torch.distributed.Store` is needed, not a backend: gloo, NCCL, torchrun's own store or MPI all do.
"""

from nvcomm.group.contract import DEFAULT_TIMEOUT_S, JSON, MAX_ANSWER_BYTES, Group
from nvcomm.group.mpi import from_mpi
from nvcomm.group.origin import as_group, from_environment, from_process_group, started_by
from nvcomm.group.store_group import StoreGroup, local_groups

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JSON",
    "MAX_ANSWER_BYTES",
    "Group",
    "StoreGroup",
    "as_group",
    "from_environment",
    "from_mpi",
    "from_process_group",
    "local_groups",
    "started_by",
]
