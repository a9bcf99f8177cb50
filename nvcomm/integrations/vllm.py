# SPDX-License-Identifier: Apache-2.0
"""The plugin of vLLM, found by its entry point `vllm.general_plugins`: installed beside vLLM it is active.

vLLM calls `register` in every process. `VLLM_PLUGINS` lists the plugins to load, so `VLLM_PLUGINS=` leaves it out.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module

HOMES = {
    "cpu": ("vllm.distributed.device_communicators.cpu_communicator", "CpuCommunicator"),
    "cuda": ("vllm.distributed.device_communicators.custom_all_reduce", "CustomAllreduce"),
}
OURS = {
    "cpu": ("nvcomm.integrations.vllm_cpu", "NvcommCpuCommunicator"),
    "cuda": ("nvcomm.integrations.vllm_allreduce", "VllmAllreduce"),
}
_KEYWORDS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

log = logging.getLogger("vllm.nvcomm")


def register() -> None:
    """Puts our class where vLLM looks for its own: on GPUs its custom all-reduce, on CPUs its communicator.

    Again, it changes nothing. If vLLM's class has methods or arguments that ours does not know, vLLM's stays, and a
    warning says which.
    """
    from vllm.platforms import current_platform

    kind = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else None
    if kind is None:
        log.warning("nvcomm is off: it has no collectives for the platform %s.", current_platform.device_name)
        return
    home, name = HOMES[kind]
    module = import_module(home)
    theirs = getattr(module, name)
    ours = getattr(import_module(OURS[kind][0]), OURS[kind][1])
    if theirs is ours:
        return
    unknown = differences(theirs, ours)
    if unknown:
        log.warning("nvcomm is off: this vLLM's %s is not the one it stands in for: %s.", name, "; ".join(unknown))
        return
    setattr(module, name, ours)


def differences(theirs: type, ours: type) -> list[str]:
    """What a caller of `theirs` may do that `ours` does not take: missing methods, and arguments by name or place."""
    found = []
    for name, value in vars(theirs).items():
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(ours, name):
            found.append(f"{name} is missing")
        elif inspect.isroutine(value):
            found += [f"{name}: {what}" for what in _signature_gaps(getattr(theirs, name), getattr(ours, name))]
    return found


def _signature_gaps(theirs: object, ours: object) -> list[str]:
    wanted = inspect.signature(theirs).parameters  # type: ignore[arg-type]
    given = inspect.signature(ours).parameters  # type: ignore[arg-type]
    gaps = [f"no argument {name}" for name in wanted if name not in given]
    places = [name for name, parameter in wanted.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if not gaps and places != list(given)[: len(places)]:
        gaps.append(f"arguments in the order {list(given)}, not {places}")
    needed = (name for name, p in given.items() if p.default is p.empty and p.kind in _KEYWORDS and name not in wanted)
    return gaps + [f"needs {name}" for name in needed]
