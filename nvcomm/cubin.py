# SPDX-License-Identifier: Apache-2.0
"""What a cubin says about its kernels: registers and local memory, from the ELF itself, and SASS through nvdisasm."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvcomm.errors import UnsupportedError

# Attribute numbers of the section `.nv.info`, whose entries are (format, attribute, size or value, payload).
_FORMAT_SIZED = 0x04
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_REGISTER_COUNT = 0x2F
_SYMBOL_TABLE = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes.

    Attributes:
        registers: 32-bit registers of a thread.
        frame_bytes: local memory of a thread: spills and arrays that did not fit into registers.
    """

    registers: int
    frame_bytes: int


def resource_usage(cubin: bytes) -> dict[str, Usage]:
    """Kernel name -> usage.

    Raises:
        ValueError: not a 64-bit little-endian ELF image.
    """
    sections = _sections(cubin)
    names = _symbols(cubin, sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, symbol, value in _attributes(cubin, sections):
        if attribute == _REGISTER_COUNT:
            registers[names[symbol]] = value
        elif attribute in {_FRAME_SIZE, _MIN_STACK_SIZE}:
            frames[names[symbol]] = max(value, frames.get(names[symbol], 0))
    return {name: Usage(count, frames.get(name, 0)) for name, count in registers.items()}


def disassemble(cubin: bytes) -> str:
    """SASS text.

    Raises:
        UnsupportedError: there is no nvdisasm (PyPI: nvidia-cuda-nvdisasm), or it does not know the image.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise UnsupportedError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory(prefix="nvcomm-compile-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise UnsupportedError(f"{tool} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def find_nvdisasm() -> str | None:
    """The nvdisasm of the PyPI package in this interpreter's environment, else the one in PATH, else None."""
    for folder in sys.path:
        for found in sorted(Path(folder or ".").glob("nvidia/*/bin/nvdisasm")):
            return str(found)
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _sections(cubin: bytes) -> list[_Section]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF image: it begins with {cubin[:6]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names_at = raw[names_index][4]
    return [_Section(_text(cubin, names_at + one[0]), one[1], one[4], one[5], one[6]) for one in raw]


def _symbols(cubin: bytes, sections: list[_Section]) -> list[str]:
    table = next(section for section in sections if section.kind == _SYMBOL_TABLE)
    names_at = sections[table.link].offset
    return [
        _text(cubin, names_at + struct.unpack_from("<I", cubin, at)[0])
        for at in range(table.offset, table.offset + table.size, 24)
    ]


def _attributes(cubin: bytes, sections: list[_Section]) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of every two-word entry of `.nv.info`."""
    info = next(section for section in sections if section.name == ".nv.info")
    at = info.offset
    while at < info.offset + info.size:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _FORMAT_SIZED:
            if size == 8:
                yield attribute, *struct.unpack_from("<II", cubin, at)
            at += size


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
