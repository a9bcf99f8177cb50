# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver and NVML through ctypes: `nvcomm doctor` needs no package for them. Attributes only, no context.

`Driver` looks like `cuda.bindings.driver` as far as `nvcomm.topology` uses it. Numbers are those of cuda.h and nvml.h,
which keep them for ever; a test compares them with cuda-bindings.
"""

from __future__ import annotations

import ctypes
import types
from typing import Any

ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": 20,
    "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 38,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED": 128,
    "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED": 132,
}
_MAX_NVLINKS = 18
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


class Driver:
    """libcuda: each method returns (result, *outputs), as cuda.bindings does."""

    CUdevice_attribute = types.SimpleNamespace(**ATTRIBUTES)

    def __init__(self, library: Any = None) -> None:
        """Raises OSError where there is no libcuda.so.1."""
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def cuInit(self, flags: int) -> tuple[int]:
        return (self._library.cuInit(flags),)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return self._number("cuDriverGetVersion")

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return self._number("cuDeviceGetCount")

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return self._number("cuDeviceGet", index)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return self._number("cuDeviceGetAttribute", attribute, device)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[int, int]:
        return self._number("cuDeviceCanAccessPeer", device, peer)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        text = ctypes.create_string_buffer(size)
        return self._library.cuDeviceGetName(text, size, device), text.value

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:
        raw = (ctypes.c_ubyte * 16)()
        result = self._library.cuDeviceGetUuid(ctypes.byref(raw), device)
        return result, types.SimpleNamespace(bytes=bytes(raw))

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        size = ctypes.c_size_t()
        result = self._library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        return result, size.value

    def _number(self, name: str, *args: int) -> tuple[int, int]:
        value = ctypes.c_int()
        return getattr(self._library, name)(ctypes.byref(value), *args), value.value


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


class Nvml:
    """libnvidia-ml, as far as it is needed. What it does not know is None."""

    def __init__(self, library: Any = None) -> None:
        """Raises OSError where there is no libnvidia-ml.so.1, RuntimeError where it does not start."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
        result = self._library.nvmlInit_v2()
        if result:
            raise RuntimeError(f"nvmlInit_v2 returned {result}")

    def close(self) -> None:
        """Ends the use of the library."""
        self._library.nvmlShutdown()

    def driver(self) -> str | None:
        """The version of the driver, such as 580.95.05."""
        text = ctypes.create_string_buffer(96)
        return text.value.decode(errors="replace") if not self._library.nvmlSystemGetDriverVersion(text, 96) else None

    def device(self, uuid: str) -> Any:
        """The handle of the GPU with a UUID of 32 hexadecimal digits, or None."""
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        handle = ctypes.c_void_p()
        name = ("GPU-" + "-".join(parts)).encode()
        return handle if not self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) else None

    def active_nvlinks(self, handle: Any) -> int:
        """How many NVLinks are up."""
        active = 0
        for link in range(_MAX_NVLINKS):
            state = ctypes.c_int()
            if self._library.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0:
                active += state.value == 1
        return active

    def fabric(self, handle: Any) -> str | None:
        """Where the GPU's registration with an NVSwitch fabric stands."""
        info = _FabricInfo()
        if self._library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)):
            return None
        state = _FABRIC_STATES.get(info.state, f"state {info.state}")
        return state if info.status == 0 else f"{state}, error {info.status}"

    def mig(self, handle: Any) -> bool | None:
        """Whether the GPU is cut into slices (MIG)."""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        failed = self._library.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
        return None if failed else current.value == 1
