# SPDX-License-Identifier: Apache-2.0
"""What vLLM's configuration says, for the class that stands in for its `CustomAllreduce`."""

from __future__ import annotations

import logging
from typing import Any

import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none

from nvcomm.errors import UsageError
from nvcomm.integrations.custom_allreduce import CustomAllreduce

OPTIONS = ("max_bytes", "timeout_s", "pdl", "device_share")


class VllmAllreduce(CustomAllreduce):
    """`CustomAllreduce` with options from `--additional-config '{"nvcomm": {...}}'`, logging where vLLM logs."""

    log = logging.getLogger("vllm.nvcomm")

    @classmethod
    def options(cls) -> dict[str, Any]:
        """What the user chose, over the defaults.

        Raises:
            UsageError: an option that does not exist.
        """
        additional = getattr(get_current_vllm_config_or_none(), "additional_config", None)
        chosen = additional.get("nvcomm", {}) if isinstance(additional, dict) else {}
        if not isinstance(chosen, dict):
            raise UsageError(
                f"additional_config['nvcomm'] is {chosen!r}; wanted an object of options: {list(OPTIONS)}."
            )
        unknown = sorted(set(chosen) - set(OPTIONS))
        if unknown:
            raise UsageError(f"additional_config['nvcomm'] has {unknown}; the options are {list(OPTIONS)}.")
        return super().options() | chosen

    @classmethod
    def wants_batch_invariance(cls) -> bool:
        """VLLM_BATCH_INVARIANT, as in the class of vLLM's own."""
        return bool(envs.VLLM_BATCH_INVARIANT)
