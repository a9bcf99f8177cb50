# SPDX-License-Identifier: Apache-2.0
"""What all mailbox kernels share on the host's side: parameters, placeholders to compile with, the launch.

A kernel has three parameters: its work, a named tuple of its own; the rank's handle; and what the call says of itself.
A launch passes them as tuples (docs/jit.md), then the clusters of its grid and the stream.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from nvcomm import jit
from nvcomm.handle import Call, Handle, handle_placeholder, placeholder
from nvcomm.mailbox import MailboxLayout
from nvcomm.options import Pdl


class KernelConfig(Protocol):
    """What every kernel is compiled for, besides what is its own; a frozen dataclass.

    Attributes:
        layout: the mailbox.
        multicast: publish with one multicast store instead of one store per rank.
        pdl: "off": plain launch. "safe": programmatic dependent launch, trigger after the last store (R1 ii).
            "early": trigger right after the wait (R1 iii).
        device_checks: overlapping and differing calls are recorded (R7, R11).
        delayed: publish into the outbox of the delayed transport.
        threads: threads of a CTA.
        ctas_per_sm: CTAs that fit one multiprocessor whatever the compiler does.
    """

    @property
    def layout(self) -> MailboxLayout: ...
    @property
    def multicast(self) -> bool: ...
    @property
    def pdl(self) -> Pdl: ...
    @property
    def device_checks(self) -> bool: ...
    @property
    def delayed(self) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def ctas_per_sm(self) -> int: ...


class Transfer(NamedTuple):
    """The work of a kernel that reads one tensor and writes another.

    Attributes:
        inp, out: addresses of the tensors.
        num_bytes: bytes that each rank contributes, not 0.
    """

    inp: Int64
    out: Int64
    num_bytes: Int32


class MailboxKernel:
    """A kernel of one configuration. A subclass adds `kernel(work, handle, call)`, the GPU function.

    Attributes:
        config: see `KernelConfig`.
        work: the named tuple that the kernel works on.
        ctas: CTAs that share their work: a grid has a multiple of them.
        cluster: CTAs of a cluster: `ctas`, or 1 where they need none.
        shared_bytes: dynamic shared memory of a CTA; None: none.
    """

    work: ClassVar[type[Any]] = Transfer
    ctas = 1
    cluster = 1
    shared_bytes: int | None = None
    kernel: Any

    def __init__(self, config: Any) -> None:
        self.config = config

    def __init_subclass__(cls) -> None:
        # what profilers show; the DSL's own choice spells out all parameters
        cls.kernel.set_name_prefix(f"nvcomm_{cls.__name__}", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def __call__(self, work: Any, handle: Handle, call: Call, clusters: Int32, stream: CUstream) -> None:
        """Launches the kernel.

        Args:
            work: see `work`.
            handle: the rank's.
            call: not read without device checks.
            clusters: how often the grid has `ctas` CTAs, the same on every rank.
            stream: where it runs.
        """
        self.kernel(work, handle, call).launch(
            grid=(clusters * self.ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=-1,  # the driver's default; left out, the compiler asks the driver for a GPU
            use_pdl=self.config.pdl != "off",
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the parameters of `__call__`."""
        handle = handle_placeholder(self.config.layout.world_size)
        return (placeholder(self.work), handle, placeholder(Call), Int32(1), make_fake_stream())


def load(kernel: MailboxKernel) -> jit.CompiledKernel:
    """Compiles a kernel, or takes it from the cache, and loads it; waits for the device."""
    compiled = jit.compile_kernel(kernel, *kernel.fake_args(), key=(kernel.config,))
    jit.preload(compiled)  # R9
    return compiled
