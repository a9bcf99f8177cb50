# SPDX-License-Identifier: Apache-2.0
"""Worlds of GPU ranks: a stream per rank in this process, or a process per rank."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nvcomm import topology
from nvcomm.capability import check, vote
from nvcomm.collectives.all_gather import AllGatherConfig
from nvcomm.collectives.engine import DeviceEngine
from nvcomm.env import multicast_disabled_by, settings
from nvcomm.errors import CapabilityError, UnsupportedError, UsageError
from nvcomm.group import Group, StoreGroup
from nvcomm.host.recovery import above
from nvcomm.mailbox import LAYOUT_VERSION, MailboxLayout
from nvcomm.memory.symmetric import SymmetricMemory
from nvcomm.memory.virtual import VirtualMemory
from nvcomm.options import Options
from nvcomm.residency import CLAIMS, ctas_per_rank, refusal
from nvcomm.streams import OwnedStream

Rank = TypeVar("Rank")
# Longer than compiling every kernel of a communicator takes, also where the ranks share few cores.
COMPILE_S = 120.0


class CudaWorld:
    """The ranks of a virtual world on one GPU.

    Attributes:
        engines: rank r's at index r.
        streams: each rank's own stream.
    """

    def __init__(self, world_size: int, device: torch.device, options: Options) -> None:
        refuse_capture()
        layout = MailboxLayout(world_size, options.max_bytes)
        max_ctas = most_ctas(layout, world_size, device, options)
        uuid, token = topology.device(device.index).uuid, secrets.token_hex(8)
        why_not = refusal(uuid, [CLAIMS.held(uuid)], options.device_share)
        if why_not:
            raise UsageError(why_not)
        CLAIMS.hold(uuid, token, options.device_share)
        self._release = weakref.finalize(self, CLAIMS.let_go, uuid, token)  # also where nobody closes it
        self._device = device
        self.engines: list[DeviceEngine] = []
        self.streams: list[torch.cuda.Stream] = []
        with contextlib.ExitStack() as failed, torch.cuda.device(device):
            failed.callback(self._release)
            for memory in VirtualMemory.build(world_size, layout.size_bytes, device):
                owned = OwnedStream(device)
                failed.callback(owned.close)
                self.streams.append(owned.stream)
                self.engines.append(
                    DeviceEngine(memory, layout, device, options, max_ctas=max_ctas, ranks_on_device=world_size)
                )
                failed.callback(self.engines[-1].close)
            self._resources = failed.pop_all()

    def run(self, ranks: Sequence[Rank], call: Callable[[Rank], Any]) -> None:
        """Calls every rank on its stream, forked from the current one and joined with it."""
        current = torch.cuda.current_stream(self._device)
        for stream in self.streams:
            stream.wait_stream(current)
        try:
            for rank, stream in zip(ranks, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    call(rank)
        finally:  # also when a rank raised: a capture must not end with a stream unjoined
            for stream in self.streams:
                current.wait_stream(stream)

    def reset(self) -> None:
        """R10b in one process: the device drains, then every mailbox is armed before anybody may publish."""
        try:
            torch.cuda.synchronize(self._device)
            generation = above([engine.generation() for engine in self.engines])
            for engine in self.engines:
                engine.arm(generation)
        except BaseException:
            for engine in self.engines:
                engine.break_down()
            raise

    def close(self) -> None:
        """Lets go of mailboxes and streams, the last first."""
        self._resources.close()


def build_peer(group: Group, device: torch.device, options: Options) -> DeviceEngine:
    """One rank of a world of processes, each with a GPU or a share of one. Collective; see `Communicator`."""
    refuse_capture()
    if not isinstance(group, StoreGroup):
        raise UsageError(
            f"group is a {type(group).__name__}; GPU ranks need a store, through which PyTorch maps their memory: pass "
            "a torch process group, an mpi4py communicator or an nvcomm.group.StoreGroup."
        )
    layout = MailboxLayout(group.world_size, options.max_bytes)
    ours: dict[str, Any] = {
        "max_bytes": options.max_bytes,
        "pdl": options.pdl,
        "device_share": options.device_share,
        "generation": options.generation,
        "protocol": options.protocol,
        "transport": options.transport,
        "mailbox layout version": LAYOUT_VERSION,
        "NVCOMM_DEVICE_CHECKS": settings().device_checks,
    }
    check([], group, options.timeout_s, config=ours)
    with torch.cuda.device(device):
        # What fails on one rank is told to all before anybody leaves: no rank waits for one that has given up.
        token = secrets.token_hex(8)
        facts: list[Any] = vote(group, "nvcomm.peer.device", lambda: _device_facts(device, token), options.timeout_s)
        uuids, token = [fact["uuid"] for fact in facts], facts[0]["token"]
        for uuid in dict.fromkeys(uuids):
            held = [fact["held"] for fact in facts if fact["uuid"] == uuid]
            why_not = refusal(uuid, held, options.device_share)
            if why_not:  # on every rank alike: all know what all hold
                raise CapabilityError(f"ranks cannot share their GPUs: {why_not}")
        # Every rank launches the same grid: the one that fits the most crowded device.
        crowd = max(uuids.count(uuid) for uuid in uuids)
        grids = vote(group, "nvcomm.peer.ctas", lambda: most_ctas(layout, crowd, device, options), options.timeout_s)
        fewest = min(int(str(ctas)) for ctas in grids)
        wanted = options.transport in ("auto", "multicast")
        memory = SymmetricMemory(group, device, layout.size_bytes, multicast=wanted, timeout_s=options.timeout_s)
        if options.transport == "multicast" and not memory.multicast_ptr:
            memory.close()
            why_not = _why_no_multicast() or "a rank's GPU has none."
            raise UnsupportedError(f"transport='multicast': {why_not} Take transport='auto', or see `nvcomm doctor`.")
        engines: list[DeviceEngine] = []
        try:
            # Nobody publishes into a mailbox not yet armed. A rank whose cache is cold compiles first.
            vote(
                group,
                "nvcomm.peer.armed",
                lambda: engines.append(
                    DeviceEngine(memory, layout, device, options, max_ctas=fewest, ranks_on_device=crowd, group=group)
                ),
                options.timeout_s + COMPILE_S,
            )
        except BaseException:
            for engine in engines:
                engine.close()
            memory.close()
            raise
    CLAIMS.hold(uuids[group.rank], token, options.device_share)
    engines[0].on_close(weakref.finalize(engines[0], CLAIMS.let_go, uuids[group.rank], token))
    return engines[0]


def _device_facts(device: torch.device, token: str) -> dict[str, Any]:
    uuid = topology.device(device.index).uuid
    return {"uuid": uuid, "held": CLAIMS.held(uuid), "token": token}


def most_ctas(layout: MailboxLayout, ranks_on_device: int, device: torch.device, options: Options) -> int:
    """CTAs that a rank may launch on `device` (R8)."""
    return ctas_per_rank(
        num_sms=topology.device(device.index).num_sms,
        ctas_per_sm=AllGatherConfig(layout).ctas_per_sm,
        ranks_on_device=ranks_on_device,
        early_trigger=options.pdl == "early",
        device_share=options.device_share,
        agents=ranks_on_device if options.transport == "delayed" else 0,
    )


def _why_no_multicast() -> str | None:
    variable = multicast_disabled_by()
    return f"{variable} switches it off." if variable else None


def refuse_capture() -> None:
    """Raises UsageError while the current stream is captured: building allocates and synchronises (R9)."""
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a communicator was built while a CUDA graph is captured, which its allocations would break: "
            "build it before the capture."
        )
