# SPDX-License-Identifier: Apache-2.0
"""Compile a CuTe DSL kernel once, keep it on disk, launch it for a few microseconds, load it before anybody spins.

How arguments travel (docs/jit.md): a kernel is compiled through TVM-FFI, so a launch is one C call. Annotate every
scalar parameter of `__call__` (`Int64`, `Int32`, ...); at the launch pass Python integers. They travel as 64 bits
and are checked against the parameter's type: a value that does not fit raises, nothing is truncated. The stream is the
last parameter, unannotated, `make_fake_stream()` when compiling and the handle as a Python integer
(`torch.cuda.current_stream().cuda_stream`) at the launch. A launch allocates nothing and synchronises nothing
once the kernel is loaded: capture it on any stream after `preload`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvcomm import topology
from nvcomm.cubin import Usage, disassemble, resource_usage
from nvcomm.env import other, settings
from nvcomm.errors import CudaError, UnsupportedError
from nvcomm.kernel_cache import KernelCache
from nvcomm.kernel_compiler import compile_for, export, link
from nvcomm.kernel_key import describe_request, is_number, names
from nvcomm.preload import load_functions_of, resident_ctas_of

log = logging.getLogger("nvcomm.jit")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel that can be launched.

    Attributes:
        name: its name in the cache, a digest of everything that went into it.
        launch: the raw TVM-FFI function; calling it directly saves 0.1 us and loses the typed errors.
        fake_launch_args: the arguments it was compiled with as plain values, without the stream.
    """

    name: str
    launch: Callable[..., Any]
    fake_launch_args: tuple[Any, ...]

    def __call__(self, *args: Any) -> None:
        """Launches: the arguments of the kernel's `__call__`, with the stream handle (an int) last.

        Raises:
            CudaError: CUDA refused to load or to launch.
            TypeError, ValueError: an argument does not fit its parameter; nothing was launched.
        """
        try:
            self.launch(*args)
        except (TypeError, ValueError):
            raise
        except Exception as error:
            raise _cuda_error(error) from error


@dataclass(frozen=True, slots=True)
class Artifacts:
    """What a kernel compiles to, for the compile checks.

    Attributes:
        arch: the architecture it was compiled for.
        ptx: PTX text.
        cubin: the ELF image.
        usage: kernel name -> registers and local memory.
    """

    arch: str
    ptx: str
    cubin: bytes
    usage: dict[str, Usage]


def target_arch() -> str:
    """The architecture to compile for: CUTE_DSL_ARCH, else that of the current GPU, such as `sm_90a`.

    Raises:
        UnsupportedError: neither is there.
    """
    arch = other("CUTE_DSL_ARCH")
    if arch is None:
        found = topology.current_arch()
        if isinstance(found, topology.Unknown):
            raise UnsupportedError(
                f"there is no GPU to compile for ({found.reason}). Set CUTE_DSL_ARCH, for instance to sm_90a."
            )
        return found
    return arch


def compile_kernel(kernel: Any, *fake_args: Any, key: tuple[Any, ...]) -> CompiledKernel:
    """Compiles `kernel` for `target_arch()`, or takes it from this process or the disk.

    Args:
        kernel: an object whose `__call__` is `@cute.jit`; its class lives in a file.
        *fake_args: one placeholder for each parameter, such as `Int64(0)`; the stream's, `make_fake_stream()`, last.
        key: everything that `kernel` was configured with: hashable, and its repr is the same in every process.

    Raises:
        UsageError: the key or an argument is not reproducible, or the cache folder is not safe to use.
        UnsupportedError: no architecture to compile for.
    """
    arch = target_arch()
    text = describe_request(kernel, fake_args, key, arch)
    with _LOCK:
        compiled = _COMPILED.get(text)
        if compiled is None:
            name, function = _from_disk_or_compiler(kernel, fake_args, arch, text)
            compiled = CompiledKernel(name, function, tuple(_plain(arg) for arg in fake_args[:-1]))
            _COMPILED[text] = compiled
    return compiled


def preload(kernel: CompiledKernel, *args: Any) -> int:
    """Loads `kernel` into the current context, launching nothing. Returns the number of GPU functions loaded.

    CUDA loads a kernel at its first launch, and that load waits for the device: with another rank's kernel spinning
    there it waits for ever. This captures one launch into a graph that is thrown away, and asks the driver to load
    what the graph holds. Call it before anything spins on the device; it may wait for the device.

    Args:
        kernel: what `compile_kernel` returned.
        *args: launch arguments without the stream; the kernel never sees them. Default: those it was compiled
            with, as long as they are numbers and give a launch that CUDA accepts (a grid of 0 is not).

    Raises:
        CudaError: a driver call failed.
        UsageError: no CUDA context is current (torch.cuda.set_device makes one).
    """
    launch_args = args or kernel.fake_launch_args
    return load_functions_of(lambda stream: kernel(*launch_args, stream))


def resident_ctas_per_sm(kernel: CompiledKernel, *args: Any) -> int:
    """CTAs of `kernel` that one multiprocessor of the current device holds at once; for the rest see `preload`."""
    launch_args = args or kernel.fake_launch_args
    return resident_ctas_of(lambda stream: kernel(*launch_args, stream))


def pack(values: tuple[Any, ...]) -> Any:
    """A nested tuple of integers as TVM-FFI's own array: what many launches pass is then converted once."""
    import tvm_ffi

    return tvm_ffi.convert(values)


def artifacts(kernel: Any, *fake_args: Any, arch: str | None = None) -> Artifacts:
    """Compiles `kernel` for `arch` (default `target_arch()`), past every cache, and returns PTX and cubin."""
    arch = arch or target_arch()
    with _LOCK:
        compiled = compile_for(arch, kernel, fake_args, keep=True)
    return Artifacts(arch, compiled.__ptx__, compiled.__cubin__, resource_usage(compiled.__cubin__))


def cache_names(kernel: Any, *fake_args: Any, key: tuple[Any, ...], arch: str) -> tuple[str, ...]:
    """The names that an entry for this kernel may have, first choice first (see docs/jit.md, "The cache")."""
    return names(describe_request(kernel, fake_args, key, arch))


# One process has one set of loaded kernels: CUDA never unloads what a captured graph may still launch.
_COMPILED: dict[str, CompiledKernel] = {}
# The DSL traces through process-wide state.
_LOCK = threading.RLock()


def _from_disk_or_compiler(kernel: Any, fake_args: tuple[Any, ...], arch: str, text: str) -> tuple[str, Any]:
    cache = KernelCache(settings().cache_dir)
    entries = names(text)
    dumps = sorted(settings().dump)
    for name in entries:
        if all(cache.exists(f"{name}.{kind}") for kind in dumps) and (body := cache.load(f"{name}.o")) is not None:
            log.debug("%s: from %s", name, cache.path)
            return name, link(body)
    log.info("%s: compiling for %s", type(kernel).__qualname__, arch)
    compiled = compile_for(arch, kernel, fake_args, keep=bool(dumps))
    body = export(compiled)
    cache.store(f"{entries[0]}.o", body)
    for kind in dumps:
        cache.write_text(f"{entries[0]}.{kind}", compiled.__ptx__ if kind == "ptx" else disassemble(compiled.__cubin__))
    # The object is linked again rather than run as compiled: one path, whether it comes from the disk or not.
    return entries[0], link(body)


def _plain(arg: Any) -> Any:
    """The value to launch with that corresponds to a placeholder; anything but numbers stays as it is."""
    if isinstance(arg, list | tuple):
        return tuple(_plain(one) for one in arg)
    return arg.value if is_number(arg) and hasattr(arg, "value") else arg


def _cuda_error(error: Exception) -> Exception:
    """The DSL's error as ours, if it carries a CUDA result; else itself."""
    code = getattr(error, "_error_code", None)
    name = getattr(error, "_error_name", "")
    if isinstance(code, int):
        return CudaError(code, name.decode() if isinstance(name, bytes) else str(name), "launch")
    head, found, rest = str(error).partition("Got Cuda Runtime Error: ")
    if found:
        return CudaError(-1, rest.split()[0], "loading the kernel")
    return error
