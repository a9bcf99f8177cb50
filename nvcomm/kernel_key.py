# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel is called in the cache: a digest of everything that decides what is compiled."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from typing import Any

from nvcomm import topology
from nvcomm.env import settings
from nvcomm.errors import UsageError
from nvcomm.source_digest import source_digest

# The driver version in the key of an entry that was compiled without a driver (`nvcomm compile`).
AHEAD_OF_TIME = "none"


def describe_request(kernel: Any, fake_args: tuple[Any, ...], key: tuple[Any, ...], arch: str) -> str:
    """Everything that decides what is compiled, except for the versions, as one text."""
    kind = type(kernel)
    arguments = [_describe(arg) for arg in fake_args]
    text = json.dumps(
        {
            "kernel": f"{kind.__module__}.{kind.__qualname__}",
            "key": repr(key),
            "arguments": arguments,
            "arch": arch,
            "device_checks": settings().device_checks,
            "source": source_digest(kind.__module__),
        },
        sort_keys=True,
    )
    if " at 0x" in text:
        raise UsageError(
            f"the key or an argument of {kind.__qualname__} prints an address, which differs from process to process: "
            f"key={key!r}, arguments={arguments}. Use plain values, enums or dataclasses of them."
        )
    return text


def names(text: str) -> tuple[str, ...]:
    """Cache names: for this driver, then for an entry made ahead of time.

    The object holds machine code that the DSL's own assembler made, so an entry that was compiled without a driver
    serves every driver; the driver is in the key because it can refuse an image, and a new one may not.
    """
    version = topology.driver_version()
    drivers = [AHEAD_OF_TIME] if isinstance(version, topology.Unknown) else [str(version), AHEAD_OF_TIME]
    stem = json.loads(text)["kernel"].rpartition(".")[2]
    return tuple(
        f"{stem}-{hashlib.sha256(json.dumps([text, _versions(), one]).encode()).hexdigest()}" for one in drivers
    )


def _versions() -> dict[str, str]:
    import cutlass
    import tvm_ffi

    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "dsl": cutlass.__version__,
        "tvm_ffi": tvm_ffi.__version__,
    }


def _describe(arg: Any) -> Any:
    """An argument as the compiler sees it: its type, and for a tensor its shape, strides and alignment."""
    if isinstance(arg, list | tuple):
        return [_describe(one) for one in arg]
    if is_number(arg) or type(arg).__name__ == "_FakeStream":
        return type(arg).__name__
    return f"{type(arg).__name__}: {getattr(arg, '__cache_key__', arg)!r}"


def is_number(arg: Any) -> bool:
    """Whether an argument is a number, of Python's or of the DSL's: its value decides nothing, its type does."""
    from cutlass.base_dsl.typing import Numeric

    return isinstance(arg, bool | int | float | Numeric)
