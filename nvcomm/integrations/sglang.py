# SPDX-License-Identifier: Apache-2.0
"""The plugin of SGLang, found by its entry point `sglang.srt.plugins`: installed beside SGLang it is active.

SGLang asks `dispatch_custom_allreduce` for the class of its custom all-reduce and builds one for each group; a hook
around it gives ours. `SGLANG_PLUGINS` lists the plugins to load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nvcomm.integrations.custom_allreduce import CustomAllreduce

TARGET = "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce"


class SglangAllreduce(CustomAllreduce):
    """`CustomAllreduce` that logs where SGLang logs."""

    log = logging.getLogger("sglang.srt.nvcomm")


def register() -> None:
    """Registers the hook. SGLang calls this once in every process, and applies the hooks itself."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, dispatch, HookType.AROUND)


def dispatch(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of `theirs`, SGLang's `dispatch_custom_allreduce`, which newer versions call with a group and a device.

    Ours on NVIDIA's GPUs. Elsewhere what SGLang chooses, such as AMD's class: there ours would only switch itself off.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return theirs(*args, **kwargs)
    return SglangAllreduce
