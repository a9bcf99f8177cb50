# SPDX-License-Identifier: Apache-2.0
"""What the harness's kernels share: what each is told besides its work, the launch, how it is compiled.

Named tuples: of numbers on the host, of DSL values inside a kernel. One by one and in this order the fields are the GPU
function's parameters, as for the collectives (`nvcomm/handle.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, get_args, get_type_hints

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from nvcomm.jit import CompiledKernel, compile_kernel
from stress import oracle

THREADS = 256
# Enough to check 256 KiB in one pass, few enough to leave room for the gathers of the other ranks.
MAX_CTAS = 32
WORD = 4


class RankHandle(NamedTuple):
    """A rank of a run: the same in every launch.

    Attributes:
        x: its inputs, `oracle.GATHERS_PER_REPLAY` of them.
        x_stride: bytes from one input to the next.
        out: its outputs, as many; the rows of each without a gap.
        out_stride: bytes from one output to the next.
        ledger: see `stress/ledger.py`.
        seed_key: the run's key.
        reserved: how many words of 65,536 are reserved ones.
        rank: which one it is.
    """

    x: Int64
    x_stride: Int64
    out: Int64
    out_stride: Int64
    ledger: Int64
    seed_key: Uint32
    reserved: Uint32
    rank: Int32


class Place(NamedTuple):
    """A collective of a replay, inside a kernel."""

    gather: int | Int32
    replay: Uint32


class Share(NamedTuple):
    """Which words of an array a thread takes, inside a kernel: every `stride`th from `first` on."""

    first: Int32
    stride: Int32


def key_of(handle: RankHandle, rank: int | Int32, place: Place) -> Uint32:
    """The key of what `rank` sends in a collective."""
    return oracle.key(handle.seed_key, Uint32(rank), Uint32(place.gather), place.replay, Uint32)


class StressKernel:
    """A kernel of the harness. A subclass adds `kernel(work, handle)`, the GPU function.

    No programmatic dependent launch: it begins when the collective before it has ended.

    Attributes:
        work: the named tuple that the kernel works on.
        threads: of a CTA.
        shared_bytes: dynamic shared memory of a CTA; None: none.
        key: everything that the kernel was configured with.
    """

    work: ClassVar[type[Any]]
    threads = THREADS
    shared_bytes: int | None = None
    key: tuple[object, ...] = ()
    kernel: Any

    def __init_subclass__(cls) -> None:
        # what profilers show; the DSL's own choice spells out all parameters
        cls.kernel.set_name_prefix(f"stress_{cls.__name__}", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def __call__(self, work: Any, handle: RankHandle, ctas: Int32, stream: CUstream) -> None:
        """Launches the kernel.

        Args:
            work: see `work`.
            handle: the rank's.
            ctas: grid size.
            stream: where it runs.
        """
        self.kernel(work, handle).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            preferred_smem_carveout=-1,  # the driver's default; left out, the compiler asks the driver for a GPU
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the parameters of `__call__`."""
        return (_placeholder(self.work), _placeholder(RankHandle), Int32(1), make_fake_stream())


def load(kernel: StressKernel) -> CompiledKernel:
    """Compiles a kernel, or takes it from the cache."""
    return compile_kernel(kernel, *kernel.fake_args(), key=kernel.key)


def num_ctas(words: int) -> int:
    """CTAs that go through arrays of which the longest has `words` words."""
    return min(MAX_CTAS, max(1, -(-words // THREADS)))


def _placeholder(kind: type[Any]) -> Any:
    """A named tuple of DSL numbers, to compile with; a sequence holds one for each collective of a replay."""
    fields = [
        [number(0) for number in get_args(field) * oracle.GATHERS_PER_REPLAY] or field(0)
        for field in get_type_hints(kind).values()
    ]
    return kind(*fields)
