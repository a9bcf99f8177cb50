# SPDX-License-Identifier: Apache-2.0
"""The DSL's compiler and linker: from a kernel object to machine code, from machine code to a function."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# The name of the function in every object: objects are linked apart from each other.
ENTRY = "nvcomm_kernel"


def compile_for(arch: str, kernel: Any, fake_args: tuple[Any, ...], *, keep: bool) -> Any:
    """Compiles past every cache; `keep`: with its PTX and cubin as `__ptx__` and `__cubin__`."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(prefix="nvcomm-compile-") as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch}"
        if keep:
            options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
        with no_arguments():
            return cute.compile(kernel, *fake_args, options=options)


@contextlib.contextmanager
def no_arguments() -> Iterator[None]:
    """The DSL looks for `-diagnostic` on the program's command line, and takes a `-d` of the program for it."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def export(compiled: Any) -> bytes:
    """The object file of what `compile_for` returned."""
    with tempfile.TemporaryDirectory(prefix="nvcomm-compile-") as folder:
        path = f"{folder}/kernel.o"
        compiled.export_to_c(path, function_name=ENTRY)
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()


def link(body: bytes) -> Callable[..., Any]:
    """Links an object into this process. It goes through an anonymous file: what was checked is what is linked."""
    from cutlass.cute.runtime import load_module

    memory = os.memfd_create("nvcomm-kernel", os.MFD_CLOEXEC)
    with os.fdopen(memory, "wb") as file:
        file.write(body)
        file.flush()
        function: Callable[..., Any] = load_module(f"/proc/self/fd/{memory}", enable_tvm_ffi=True)[ENTRY]
        return function
