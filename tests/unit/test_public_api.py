# SPDX-License-Identifier: Apache-2.0
"""Names and signatures that programs rely on, beside this file in public_api.txt: a change of them has to be meant.

To write the file anew: python -m tests.unit.test_public_api
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import nvcomm
from nvcomm import env

SNAPSHOT = Path(__file__).with_name("public_api.txt")
# Beside `nvcomm.__all__`: what docs/api.md lists by its module.
OTHERS = (
    "nvcomm.virtual.VirtualWorld",
    "nvcomm.watcher.Watcher",
    "nvcomm.options.Options",
    "nvcomm.stats.Stats",
    "nvcomm.stats.Audit",
    "nvcomm.group.StoreGroup",
    "nvcomm.group.as_group",
    "nvcomm.group.from_process_group",
    "nvcomm.group.from_environment",
    "nvcomm.group.from_mpi",
    "nvcomm.launch.launched",
    "nvcomm.capability.Requirement",
    "nvcomm.capability.check",
    "nvcomm.capability.vote",
    "nvcomm.capability.agree",
    "nvcomm.collectives.all_reduce_mhc.AllReduceMhc",
    "nvcomm.collectives.all_reduce_mhc_config.PublishTarget",
    "nvcomm.integrations.torch_ops.register",
    "nvcomm.integrations.torch_ops.TorchOps",
    "nvcomm.integrations.custom_allreduce.CustomAllreduce",
    "decode.topk.decode_topk",
    "decode.topk.decode_topk_blocks",
    "decode.sharded_topk.sharded_topk",
    "decode.sharded_topk.owned_rows",
    "decode.sparse_mla.sparse_mla",
    "decode.sparse_mla.ColumnSet",
    "decode.kv_cache.record_view",
)


def lines():
    """A line for each function, class, method and attribute that a class shows; defaults and kinds included."""
    names = [f"nvcomm.{name}" for name in nvcomm.__all__ if name != "__version__"]
    for name in (*names, *OTHERS):
        module, _, short = name.rpartition(".")
        value = getattr(importlib.import_module(module), short)
        yield f"{name}{signature(value)}"
        if inspect.isclass(value):
            yield from members(name, value)
    for variable in env.VARIABLES:
        yield f"{variable.name}={variable.default}"


def members(name, cls):
    """What a class and its bases of ours define."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] in ("nvcomm", "decode")]
    for member in sorted({member for base in own for member in vars(base)}):
        value = inspect.getattr_static(cls, member)
        if member.startswith("_") and member not in ("__call__", "__enter__"):
            continue
        if isinstance(value, property):
            yield f"  {member}: property{', settable' if value.fset else ''}"
        elif callable(getattr(cls, member)):
            yield f"  {member}{signature(getattr(cls, member))}"


def signature(value):
    """Parameters without annotations, which may be worded otherwise."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def test_nothing_has_changed_by_accident():
    now = list(lines())
    before = SNAPSHOT.read_text().splitlines()
    gone, new = [line for line in before if line not in now], [line for line in now if line not in before]
    assert (gone, new) == ([], []), "meant? then write the file anew, and tell it in CHANGELOG.md"
    assert now == before


def test_a_changed_default_is_seen():
    def call(x, *, protocol="auto"):
        """Stands for a method."""

    def changed(x, *, protocol="ll"):
        """The same with another default."""

    assert signature(call) == "(x, *, protocol='auto')"
    assert signature(call) != signature(changed)


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
    sys.exit(0)
