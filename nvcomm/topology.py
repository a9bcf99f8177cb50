# SPDX-License-Identifier: Apache-2.0
"""What the CUDA driver says about this machine. Reads attributes, creates nothing: no context, no multicast object.

Where there is no driver every answer is an `Unknown` with the reason, so that `nvcomm doctor` works anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nvcomm import driver as cuda_driver
from nvcomm.errors import CudaError, UnsupportedError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU that this process can see.

    Attributes:
        index: its CUDA ordinal here; CUDA_VISIBLE_DEVICES renumbers, so compare `uuid` between processes.
        uuid: 32 hexadecimal digits, the same for every process that sees this GPU (or this MIG slice).
        name: the marketing name, for people; nothing is decided by it.
        arch: `sm_90a` and the like.
        num_sms: streaming multiprocessors.
        memory_bytes: device memory.
        l2_bytes: size of the L2 cache.
        multicast: whether the driver offers NVLink multicast objects on it.
        virtual_memory: whether cuMemMap works with it, which peer mappings need.
        peers: ordinals of the visible GPUs whose memory it can map.
    """

    index: int
    uuid: str
    name: str
    arch: str
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    multicast: bool
    virtual_memory: bool
    peers: tuple[int, ...]


def driver_version(driver: Any = None) -> int | Unknown:
    """The CUDA version of the driver, 1000 * major + 10 * minor."""
    return _ask(lambda: int(cuda_driver.call("cuDriverGetVersion", driver=driver)))


def current_arch(driver: Any = None) -> str | Unknown:
    """The architecture of the device of the current context, or of device 0 where there is no context."""

    def ask() -> str:
        cuda_driver.call("cuInit", 0, driver=driver)
        has_context = int(cuda_driver.call("cuCtxGetCurrent", driver=driver)) != 0
        device = cuda_driver.call("cuCtxGetDevice", driver=driver) if has_context else 0
        return _arch(device, driver)

    return _ask(ask)


def devices(driver: Any = None) -> tuple[Device, ...] | Unknown:
    """Every GPU that this process can see."""

    def ask() -> tuple[Device, ...]:
        cuda_driver.call("cuInit", 0, driver=driver)
        count = int(cuda_driver.call("cuDeviceGetCount", driver=driver))
        return tuple(_device(index, count, driver) for index in range(count))

    return _ask(ask)


def device(index: int, driver: Any = None) -> Device:
    """GPU `index`.

    Raises:
        UnsupportedError: there is no driver.
        CudaError: there is no such device, or the driver failed.
    """
    cuda_driver.call("cuInit", 0, driver=driver)
    return _device(index, int(cuda_driver.call("cuDeviceGetCount", driver=driver)), driver)


def _device(index: int, count: int, driver: Any) -> Device:
    handle = cuda_driver.call("cuDeviceGet", index, driver=driver)
    others = [other for other in range(count) if other != index]
    return Device(
        index=index,
        uuid=bytes(cuda_driver.call("cuDeviceGetUuid", handle, driver=driver).bytes).hex(),
        name=_text(cuda_driver.call("cuDeviceGetName", 128, handle, driver=driver)),
        arch=_arch(handle, driver),
        num_sms=_attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", handle, driver),
        memory_bytes=int(cuda_driver.call("cuDeviceTotalMem", handle, driver=driver)),
        l2_bytes=_attribute("CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE", handle, driver),
        multicast=bool(_attribute("CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED", handle, driver)),
        virtual_memory=bool(_attribute("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", handle, driver)),
        peers=tuple(
            other
            for other in others
            if int(
                cuda_driver.call(
                    "cuDeviceCanAccessPeer",
                    handle,
                    cuda_driver.call("cuDeviceGet", other, driver=driver),
                    driver=driver,
                )
            )
        ),
    )


def _arch(handle: Any, driver: Any) -> str:
    major = _attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", handle, driver)
    minor = _attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", handle, driver)
    # From Hopper on, the instructions that only this architecture has are behind the suffix.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _attribute(name: str, handle: Any, driver: Any) -> int:
    module = cuda_driver.load() if driver is None else driver
    return int(
        cuda_driver.call("cuDeviceGetAttribute", getattr(module.CUdevice_attribute, name), handle, driver=driver)
    )


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.split(b"\0")[0].decode(errors="replace")


def _ask(question: Callable[[], Answer]) -> Answer | Unknown:
    try:
        return question()
    except (CudaError, UnsupportedError) as error:
        return Unknown(str(error))
