# SPDX-License-Identifier: Apache-2.0
"""Calls into the CUDA driver: one function, typed errors, nothing loaded before the first call."""

from __future__ import annotations

from typing import Any

from nvcomm.errors import CudaError, UnsupportedError


def load() -> Any:
    """The module `cuda.bindings.driver`.

    Raises:
        UnsupportedError: the package is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(f"cuda-bindings does not import ({error}): pip install 'nvcomm[cu13]'") from error
    return driver


def call(name: str, *args: Any, driver: Any = None) -> Any:
    """Calls driver function `name`, for example `call("cuDeviceGet", 0)`.

    Args:
        name: the function's C name.
        *args: its input arguments, as cuda.bindings takes them.
        driver: stands in for the driver module (fault injection in tests).

    Returns:
        Its outputs: None, one value, or a tuple.

    Raises:
        CudaError: the driver returned something else than CUDA_SUCCESS.
        UnsupportedError: there is no driver library, or it is too old to have this function.
    """
    driver = load() if driver is None else driver
    try:
        result, *outputs = getattr(driver, name)(*args)
    except (RuntimeError, AttributeError, ImportError, OSError) as error:
        # cuda.bindings raises one of these where libcuda is missing or lacks the symbol.
        raise UnsupportedError(f"{name} cannot be called: {error}. Is the NVIDIA driver installed?") from error
    if int(result) != 0:
        raise CudaError(int(result), getattr(result, "name", str(result)), name)
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
