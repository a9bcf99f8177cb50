# SPDX-License-Identifier: Apache-2.0
"""Every error of the library. A message says what was seen, what was wanted and what to do."""

from __future__ import annotations


class NvcommError(Exception):
    """Base of all errors raised by nvcomm."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles message and attributes, whatever a subclass's constructor takes: workers hand errors to parents."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[NvcommError], args: tuple[object, ...], attributes: dict[str, object]) -> NvcommError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


class UnsupportedError(NvcommError):
    """This machine, driver or build cannot do what was asked."""


class UsageError(NvcommError, ValueError):
    """The caller's arguments or call order are wrong; nothing was launched and nothing was lost."""


class CapabilityError(NvcommError):
    """At least one rank cannot take part. Every rank of the group raises it with the same text.

    Attributes:
        reasons: rank -> its reasons; ranks without a reason are absent.
    """

    def __init__(self, message: str, reasons: dict[int, list[str]] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or {}


class GroupError(NvcommError):
    """Ranks did not find each other, or one did not answer before the deadline.

    Attributes:
        missing: ranks that did not answer, ascending; empty when unknown.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class CollectiveMismatchError(NvcommError):
    """Ranks made different calls on one mailbox (docs/mailbox.md R11), or two calls overlapped (R7)."""


class CudaError(NvcommError):
    """A CUDA driver or runtime call failed.

    Attributes:
        code: the numeric result.
        name: its symbolic name.
        call: the function that returned it.
    """

    def __init__(self, code: int, name: str, call: str) -> None:
        super().__init__(f"{call} returned {name} ({code})")
        self.code = code
        self.name = name
        self.call = call


class PeerTimeoutError(NvcommError):
    """A rank waited `timeout_s` for a word that a peer did not publish (docs/mailbox.md R10).

    Attributes:
        rank: the rank that waited.
        src_rank: the rank it waited for.
        generation: the mailbox generation of the call.
        slot: the slot of that generation.
        word: index of the first missing 32-bit word in the row of `src_rank`.
        waited_s: seconds waited.
        root_rank: the rank at the end of the chain of "waited for", where fault rows tell; else `src_rank`.
    """

    def __init__(
        self,
        rank: int,
        src_rank: int,
        *,
        generation: int,
        slot: int,
        word: int,
        waited_s: float,
        root_rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.src_rank = src_rank
        self.generation = generation
        self.slot = slot
        self.word = word
        self.waited_s = waited_s
        self.root_rank = src_rank if root_rank is None else root_rank
        root = f"; rank {self.root_rank} published nothing" if self.root_rank != src_rank else ""
        super().__init__(
            f"rank {rank} waited {waited_s:.3f} s for rank {src_rank}: generation {generation}, slot {slot}, "
            f"word {word} never arrived{root}. The communicator is broken: find out why rank {self.root_rank} "
            f"did not make this call, then call reset() on every rank, or build a new communicator."
        )
