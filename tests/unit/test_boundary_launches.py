# SPDX-License-Identifier: Apache-2.0
"""How the kernels of a sublayer boundary are launched: how many clusters, and how they follow each other (R8)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from nvcomm.collectives import all_reduce_mhc_launch
from nvcomm.collectives.all_reduce_mhc_checks import BoundaryTensors
from nvcomm.collectives.all_reduce_mhc_config import MhcConfig, MhcShape
from nvcomm.collectives.all_reduce_mhc_kernel import AllReduceMhcKernel
from nvcomm.errors import UsageError
from nvcomm.handle import Handle
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Options

LAYOUT = MailboxLayout(4, 1 << 20)
SHAPE = MhcShape(640)
PLACES = 24  # clusters of this rank that the device holds


class Launches:
    """A rank's kernels, launched by nobody: what would have been is noted down."""

    def __init__(self, monkeypatch, pdl, *, alone=False, places=PLACES):
        monkeypatch.setattr(all_reduce_mhc_launch, "load", lambda kernel: kernel.config)
        self.seen = []
        self.boundary = all_reduce_mhc_launch.MhcLauncher(
            SHAPE, ("fused", "publish", "collect"), LAYOUT, Options(max_bytes=1 << 20, pdl=pdl),
            Handle([0] * 4, 0, 0, 0, 0, 0), places=lambda ctas_per_sm: places // (2 if pdl == "early" else 1),
            alone=alone, multicast=False, launcher=self.note,
        )  # fmt: skip

    def note(self, operation, dtype, kernel, pointers, clusters):
        self.seen.append((kernel, clusters))

    def call(self, part, rows, protocol="auto"):
        """(configuration of the kernel, clusters) of a call."""
        x = torch.zeros(rows, SHAPE.hidden, dtype=torch.bfloat16)
        residual = torch.zeros(rows, 4, SHAPE.hidden, dtype=torch.bfloat16)
        mix = torch.zeros(rows, 4)
        tensors = BoundaryTensors(residual, mix, torch.zeros(rows, 4, 4), None, None, 0.0, residual, None)
        if part == "fused":
            self.boundary.fused(x, tensors, protocol)
        elif part == "publish":
            self.boundary.publish(x)
        else:
            self.boundary.collect(tensors)
        return self.seen.pop()


@pytest.mark.parametrize("protocol", ["ll", "two_shot"])
@pytest.mark.parametrize("pdl", ["off", "safe", "early"])
def test_R8_a_call_and_what_may_overlap_with_it_have_places(monkeypatch, pdl, protocol):
    launches = Launches(monkeypatch, pdl, alone=protocol == "ll")
    for rows in (*range(1, 130), 384):
        kernel, clusters = launches.call("fused", rows, protocol)
        assert kernel.two_shot == (protocol == "two_shot")
        assert clusters * (2 if kernel.pdl == "early" else 1) <= PLACES
        assert clusters <= rows


@pytest.mark.parametrize(("alone", "rounds"), [(True, 1), (False, 4)])
def test_many_rows_with_an_early_trigger_are_a_plain_launch_of_all_places(monkeypatch, alone, rounds):
    launches = Launches(monkeypatch, "early", alone=alone)
    last = rounds * (PLACES // 2)
    for rows in (1, PLACES // 2, last):
        kernel, clusters = launches.call("fused", rows)
        assert (kernel.pdl, clusters) == ("early", min(rows, PLACES // 2))
    for rows in (last + 1, 384):
        kernel, clusters = launches.call("fused", rows)
        assert (kernel.pdl, clusters) == ("off", min(rows, PLACES))


@pytest.mark.parametrize("pdl", ["off", "safe", "early"])
def test_R8_halves_of_many_rows_leave_places_for_each_other(monkeypatch, pdl):
    launches = Launches(monkeypatch, pdl)
    for part in ("publish", "collect"):
        kernel, clusters = launches.call(part, 384)
        assert (kernel.part, kernel.pdl) == (part, pdl)
        assert clusters == (PLACES if pdl == "off" else PLACES // 2)


def test_R8_a_publisher_takes_no_shared_memory_and_no_cluster(monkeypatch):
    """Whatever waits for it on every multiprocessor, it finds room (docs/mailbox.md R8)."""
    publish, collect = (AllReduceMhcKernel(MhcConfig(LAYOUT, MhcShape(5120), part)) for part in ("publish", "collect"))
    assert (publish.ctas, publish.cluster, publish.shared_bytes) == (5, 1, None)
    assert (collect.ctas, collect.cluster) == (5, 5)
    assert collect.shared_bytes


def test_a_device_without_room_for_one_row_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="takes 1 CTAs"):
        Launches(monkeypatch, "early", places=1)
