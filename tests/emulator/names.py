# SPDX-License-Identifier: Apache-2.0
"""Operands of PTX: how an instruction reads and writes them.

All registers, special ones included, are arrays with an element for each thread, of the unsigned type of the register's
width. They stand in one list; a name is resolved to its place there once, when a program is built.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import numpy as np

from tests.emulator.ptx import Kernel
from tests.emulator.values import KINDS, UNSIGNED, Array

SHARED_BASE = 1024  # address of the first byte of dynamic shared memory
SPECIAL = {
    **dict.fromkeys(("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%laneid", "%lanemask_lt"), np.uint32),
    "%cluster_ctarank": np.uint32,
    "%globaltimer": np.uint64,
}
Registers = list[Array]
Source = Callable[[Registers], Array]
_NUMBER = re.compile(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?")


class Names:
    """The registers of one kernel, and how its operands are read.

    Attributes:
        dtypes: of each register.
        places: name -> index of a register.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._declared = kernel.registers
        self.dtypes: list[type[np.generic]] = []
        self.places: dict[str, int] = {}
        for name, dtype in SPECIAL.items():
            self._add(name, dtype)
        self._constants = {"__dynamic_shmem__0": SHARED_BASE, "WARP_SZ": 32}
        offset = 0
        for name, size in zip(kernel.parameters, kernel.parameter_bytes, strict=True):
            offset += -offset % min(size, 8)
            self._constants[name] = offset
            offset += size
        self.parameter_bytes = offset

    def place(self, name: str) -> int:
        """Index of a register."""
        if name not in self.places:
            numbered = re.fullmatch(r"(%[a-z]+)\d+", name)
            declared = self._declared[numbered[1] if numbered else name]
            dtype = np.bool_ if declared == "pred" else UNSIGNED[int(declared[1:]) // 8]
            self._add(name, dtype)
        return self.places[name]

    def source(self, text: str, kind: str) -> Source:
        """How an operand is read as `kind`: an array of that type, or one number for all threads."""
        dtype = KINDS[kind]
        constant = self._constant(text, dtype)
        if constant is not None:
            return lambda registers: constant
        at = self.place(text)
        have = self.dtypes[at]
        if have == dtype:
            return operator.itemgetter(at)
        if np.dtype(have).itemsize == np.dtype(dtype).itemsize:
            return lambda registers: registers[at].view(dtype)
        narrow = UNSIGNED[np.dtype(dtype).itemsize]
        return lambda registers: registers[at].astype(narrow).view(dtype)

    def write(self, name: str) -> Callable[[Registers, Array, Array], None]:
        """A function (registers, values, active): sets a register of the active threads."""
        if name == "_":
            return lambda registers, values, active: None
        at = self.place(name)
        dtype = self.dtypes[at]

        def write(registers: Registers, values: Array, active: Array) -> None:
            target = registers[at]
            if values.dtype == dtype and values.shape == target.shape:
                np.putmask(target, active, values)  # twice as fast
            else:
                np.copyto(target, values, where=active, casting="unsafe")

        return write

    def address(self, text: str) -> Source:
        """How `[register + offset]` is read: an array of uint64."""
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        assert found is not None, text
        offset = np.uint64(int(found[2] or 0) & 0xFFFFFFFFFFFFFFFF)
        constant = self._constant(found[1], np.uint64)
        if constant is not None:
            whole = np.atleast_1d(constant + offset)
            return lambda registers: np.broadcast_to(whole, registers[0].shape)
        at = self.place(found[1])
        if self.dtypes[at] == np.uint64:
            return lambda registers: registers[at] + offset
        # Addresses of shared memory have 32 bits and wrap there.
        return lambda registers: registers[at].astype(np.uint64) + offset & np.uint64(0xFFFFFFFF)

    def _constant(self, text: str, dtype: type[np.generic]) -> np.generic | None:
        if text.startswith("%"):
            return None
        if text in self._constants:
            return UNSIGNED[np.dtype(dtype).itemsize](self._constants[text]).view(dtype)
        size = 1 if dtype == np.bool_ else np.dtype(dtype).itemsize
        if float_bits := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text):
            return np.uint32(int(float_bits[1], 16)).astype(UNSIGNED[size]).view(dtype)
        if _NUMBER.fullmatch(text):
            bits = int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)
            return UNSIGNED[size](bits).view(dtype)
        return None

    def _add(self, name: str, dtype: type[np.generic]) -> None:
        self.places[name] = len(self.dtypes)
        self.dtypes.append(dtype)


def vector(text: str) -> list[str]:
    """The elements of `{a, b}`, or of a single operand."""
    return [one.strip() for one in text.strip("{}").split(",")]
