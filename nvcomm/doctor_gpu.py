# SPDX-License-Identifier: Apache-2.0
"""Rows about GPUs, their links and what the driver offers on them. Attributes only: no context, no multicast object."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvcomm.doctor_rows import Row, ask_child

DRIVER_TIMEOUT_S = 60.0
LEAST_CUDA = 13000
TESTED_ARCHES = ("sm_90a", "sm_100a", "sm_103a")
_ASK = "import json; from nvcomm.doctor_gpu import facts; print(json.dumps(facts()))"
_EXCLUSIVE = {1: "exclusive (thread)", 2: "prohibited", 3: "exclusive process"}

Facts = dict[str, Any]


def ask() -> tuple[Facts, str]:
    """(facts, why there are none). Asked in a child: a driver that hangs or crashes takes only the child with it."""
    answer, reason = ask_child(_ASK, DRIVER_TIMEOUT_S)
    if answer is None:
        return {}, f"the driver was asked, and gave: {reason}"
    return answer, str(answer.get("error") or "")


def facts() -> Facts:
    """`library` (is libcuda there), `error`, `cuda`, `driver`, and `gpus`, a dictionary for each; runs in the child."""
    from nvcomm import topology
    from nvcomm.doctor_cuda import ATTRIBUTES, Driver, Nvml

    try:
        driver = Driver()
    except OSError as error:
        return {"library": False, "error": str(error)}
    version = topology.driver_version(driver)
    found = topology.devices(driver)
    told: Facts = {"library": True, "cuda": version if isinstance(version, int) else None, "gpus": []}
    if isinstance(found, topology.Unknown):
        return told | {"error": found.reason}
    with contextlib.ExitStack() as cleanup:
        nvml: Nvml | None = None
        with contextlib.suppress(OSError, RuntimeError, AttributeError):
            nvml = Nvml()
            cleanup.callback(nvml.close)
            told["driver"] = nvml.driver()
        for gpu in found:
            _, handle = driver.cuDeviceGet(gpu.index)

            def attribute(name: str, handle: int = handle) -> int:
                _, value = driver.cuDeviceGetAttribute(ATTRIBUTES[f"CU_DEVICE_ATTRIBUTE_{name}"], handle)
                return value

            more: Facts = {
                "compute_mode": attribute("COMPUTE_MODE"),
                "fd_handles": attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
                "fabric_handles": attribute("HANDLE_TYPE_FABRIC_SUPPORTED"),
            }
            with contextlib.suppress(AttributeError):  # an older NVML lacks a function
                if nvml is not None and (its := nvml.device(gpu.uuid)) is not None:
                    more |= {"nvlinks": nvml.active_nvlinks(its), "mig": nvml.mig(its), "fabric": nvml.fabric(its)}
            told["gpus"].append(asdict(gpu) | more)
    return told


def driver_rows(told: Facts, reason: str) -> Iterator[Row]:
    """The driver, or why there is none."""
    if reason:
        module, nodes = Path("/proc/driver/nvidia/version").exists(), Path("/dev/nvidiactl").exists()
        if told and not module and not nodes:
            where = "the library alone" if told["library"] else "none"
            found = f"{where} ({reason}): the host world works, GPU worlds do not"
            yield Row("gpu", "driver", "WARN", found, "for GPU worlds install NVIDIA's driver, 580 or newer")
        elif told and not nodes:
            fix = "start the container with GPUs (docker run --gpus all)"
            yield Row("gpu", "driver", "FAIL", f"the kernel has it, and /dev/nvidiactl is not there; {reason}", fix)
        else:
            fix = "see whether nvidia-smi works; where it does not, reinstall the driver or restart the machine"
            yield Row("gpu", "driver", "FAIL", reason, fix)
        return
    cuda = told.get("cuda") or 0
    found = f"{told.get('driver') or 'version unknown'}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    old = cuda < LEAST_CUDA
    yield Row("gpu", "driver", "FAIL" if old else "OK", found, "install driver 580 or newer (CUDA 13)" if old else "")
    if not told["gpus"]:
        fix = "see whether CUDA_VISIBLE_DEVICES hides them"
        yield Row("gpu", "GPUs", "WARN", f"none visible{_visible()}", fix)


def _gpus(told: Facts) -> Iterator[Row]:
    for gpu in told.get("gpus", ()):
        name = f"GPU {gpu['index']}"
        found = (
            f"{gpu['name']}, {gpu['arch']}, {gpu['num_sms']} SMs, {gpu['memory_bytes'] / (1 << 30):.0f} GiB{_visible()}"
        )
        mode = _EXCLUSIVE.get(gpu["compute_mode"])
        if int(gpu["arch"].removeprefix("sm_").rstrip("a")) < 90:
            yield Row(
                "gpu", name, "FAIL", found, "kernels need compute capability 9.0 (H100) or newer; the host world works"
            )
        elif mode:
            fix = f"nvidia-smi -i {gpu['index']} -c DEFAULT, or use MPS: ranks may have to share a GPU"
            yield Row("gpu", name, "FAIL" if mode == "prohibited" else "WARN", f"{found}, compute mode {mode}", fix)
        elif not gpu["virtual_memory"] or not gpu["fd_handles"]:
            fix = "use virtual worlds; processes cannot map each other's memory here (peer world)"
            yield Row("gpu", name, "WARN", f"{found}, no shareable virtual memory", fix)
        elif gpu.get("mig"):
            fix = "use virtual worlds inside a slice; slices cannot map each other's memory"
            yield Row("gpu", name, "WARN", f"{found}, cut into MIG slices", fix)
        elif gpu["arch"] not in TESTED_ARCHES:
            yield Row(
                "gpu", name, "WARN", found, f"kernels are checked for {', '.join(TESTED_ARCHES)}: run the tests first"
            )
        else:
            yield Row("gpu", name, "OK", found)


def _links(told: Facts) -> Iterator[Row]:
    gpus = told.get("gpus", ())
    if not gpus:
        return
    links = [gpu.get("nvlinks") for gpu in gpus]
    found = ", ".join(
        f"GPU {gpu['index']}: {'unknown' if n is None else n}" for gpu, n in zip(gpus, links, strict=True)
    )
    if len(gpus) > 1 and not all(links):
        yield Row(
            "gpu",
            "NVLink",
            "WARN",
            f"active links: {found}",
            "stores to peers go over PCIe: slower, and only if P2P works",
        )
    else:
        yield Row("gpu", "NVLink", "OK", f"active links: {found}")
    cut = [f"{a['index']}->{b['index']}" for a in gpus for b in gpus if a is not b and b["index"] not in a["peers"]]
    if len(gpus) == 1:
        yield Row("gpu", "P2P", "OK", "one GPU visible: ranks share it")
    elif cut:
        fix = "run ranks only on GPUs that reach each other; see nvidia-smi topo -p2p w, and IOMMU or ACS settings"
        yield Row("gpu", "P2P", "WARN", f"no access: {', '.join(cut)}", fix)
    else:
        yield Row("gpu", "P2P", "OK", f"all {len(gpus)} GPUs map each other's memory")


def _multicast(told: Facts) -> Iterator[Row]:
    from nvcomm.env import multicast_disabled_by

    gpus = told.get("gpus", ())
    if not gpus:
        return
    lacking = [str(gpu["index"]) for gpu in gpus if not gpu["multicast"]]
    off = multicast_disabled_by()
    if lacking:
        found = f"not offered by the driver on GPU {', '.join(lacking)}: a store for each peer is used"
        yield Row(
            "gpu",
            "multicast",
            "OK" if len(gpus) == 1 else "WARN",
            found,
            "needs NVSwitch, and its fabric manager running",
        )
    elif off:
        yield Row(
            "gpu", "multicast", "WARN", f"offered, and switched off by {off}", f"unset {off.split('=')[0]} to use it"
        )
    elif len(gpus) == 1:
        yield Row("gpu", "multicast", "OK", "offered; ranks that share a GPU do without")
    else:
        yield Row("gpu", "multicast", "OK", "offered on all GPUs, and no variable switches it off")


def _fabric(told: Facts) -> Iterator[Row]:
    gpus = told.get("gpus", ())
    if not gpus:
        return
    states = {gpu.get("fabric") or "unknown" for gpu in gpus}
    channel = Path("/dev/nvidia-caps-imex-channels/channel0").exists()
    found = (
        f"state {', '.join(sorted(states))}; handles {'' if all(g['fabric_handles'] for g in gpus) else 'not '}offered"
    )
    found += f"; IMEX channel {'there' if channel else 'absent'}"
    if states & {"not started", "in progress"} or any("error" in state for state in states):
        yield Row(
            "gpu", "fabric", "WARN", found, "start nvidia-fabricmanager and wait until nvidia-smi -q says Completed"
        )
    else:
        yield Row("gpu", "fabric", "OK", found)


def _mps(told: Facts) -> Iterator[Row]:
    from nvcomm.env import other

    if not told.get("gpus"):
        return
    folder = Path(other("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        alive = Path(f"/proc/{int((folder / 'nvidia-cuda-mps-control.pid').read_text())}").exists()
    except (OSError, ValueError):
        alive = False
    if alive:
        yield Row("gpu", "MPS", "OK", f"its daemon runs, at {folder}")
    elif (folder / "control").exists():
        fix = f"start nvidia-cuda-mps-control -d, or remove {folder}: CUDA programs may wait for it"
        yield Row("gpu", "MPS", "WARN", f"{folder}/control is left, and no daemon answers for it", fix)
    else:
        yield Row(
            "gpu", "MPS", "OK", "not running: needed only where processes share a GPU (nvidia-cuda-mps-control -d)"
        )


def _visible() -> str:
    from nvcomm.env import other

    devices = other("CUDA_VISIBLE_DEVICES")
    return f" (CUDA_VISIBLE_DEVICES={devices})" if devices else ""


def _devices(told: Facts) -> Iterator[Row]:
    node = Path("/dev/nvidiactl")
    if told.get("gpus") and node.exists() and not os.access(node, os.R_OK | os.W_OK):
        fix = "start the container with GPUs, or see who may use the device files"
        yield Row("gpu", "/dev/nvidiactl", "WARN", "cannot be opened by this user", fix)


PROBES: dict[str, Callable[[Facts], Iterator[Row]]] = {
    "device files": _devices,
    "GPUs": _gpus,
    "links": _links,
    "multicast": _multicast,
    "fabric": _fabric,
    "MPS": _mps,
}
