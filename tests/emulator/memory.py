# SPDX-License-Identifier: Apache-2.0
"""Global memory of the emulator: allocations with guards between them, and words that arrive late.

Every access is checked: inside of one allocation, aligned, no store to what is read-only. In ranges that were given to
`arrives_late` a store travels: it lands some time later, word by word, in any order except that stores to one address
keep theirs. Stores of one word, the mailbox's EMPTY, land at once there: a rank clears its own memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD = 256  # bytes between allocations, which are also aligned to so many
READ, WRITE, LATE = 1, 2, 4
LAND = 0.2  # of the travelling words, at each of the moments when some land
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Memory:
    """Global memory.

    Args:
        seed: of the order in which late words land.
    """

    def __init__(self, seed: int = 0) -> None:
        self._used = GUARD
        self._bytes = np.zeros(1 << 16, np.uint8)
        self._rights = np.zeros(1 << 16, np.uint8)
        self._random = np.random.default_rng(seed)
        self._prompt_word = 0
        self._flying_addr = np.zeros(0, np.int64)
        self._flying_word = np.zeros(0, np.uint32)

    def allocate(self, content: bytes | np.ndarray[Any, Any], *, writable: bool = True) -> int:
        """A copy of `content`; its address."""
        raw = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content.reshape(-1).view(np.uint8)
        start, stop = self._used, self._used + len(raw)
        self._used = stop + GUARD + -stop % GUARD
        if self._used > len(self._bytes):
            more = np.zeros(max(self._used, 2 * len(self._bytes)) - len(self._bytes) & -8, np.uint8)
            self._bytes = np.concatenate([self._bytes, more, np.zeros(8, np.uint8)])
            self._rights = np.concatenate([self._rights, more, np.zeros(8, np.uint8)])
        self._bytes[start:stop] = raw
        self._rights[start:stop] = READ | WRITE if writable else READ
        return start

    def arrives_late(self, start: int, size: int, prompt_word: int) -> None:
        """From now on stores into this range travel, but for those of `prompt_word`."""
        self._rights[start : start + size] |= LATE
        self._prompt_word = prompt_word

    @property
    def num_flying(self) -> int:
        """Words under way."""
        return len(self._flying_addr)

    def load(self, addr: np.ndarray[Any, Any], size: int, count: int = 1) -> np.ndarray[Any, Any]:
        """What lies at each address: (len(addr), count) elements of `size` bytes."""
        if len(self._flying_addr) and self._random.random() < 0.3:
            self.land(LAND)
        first = self._checked(addr, size * count, READ)
        return self._bytes.view(_UNSIGNED[size])[first[:, None] // size + np.arange(count)]

    def store(self, addr: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Values (len(addr), count) to each address; where two meet, one of them stays."""
        size = values.itemsize
        first = self._checked(addr, size * values.shape[1], WRITE)
        places = first[:, None] // size + np.arange(values.shape[1])
        late = (self._rights[first] & LATE).astype(bool)
        if late.any():
            assert size == 4, "a mailbox is written in whole words"
            travels = late[:, None] & (values != self._prompt_word)
            self._flying_addr = np.concatenate([self._flying_addr, places[travels] * 4])
            self._flying_word = np.concatenate([self._flying_word, values[travels]])
            places, values = places[~travels], values[~travels]
        self._bytes.view(_UNSIGNED[size])[places] = values

    def land(self, share: float) -> None:
        """Lets about `share` of the travelling words arrive: for each address the oldest."""
        if not self.num_flying:
            return
        _, oldest = np.unique(self._flying_addr, return_index=True)
        landed = oldest[self._random.random(len(oldest)) < share]
        self._bytes.view(np.uint32)[self._flying_addr[landed] // 4] = self._flying_word[landed]
        self._flying_addr = np.delete(self._flying_addr, landed)
        self._flying_word = np.delete(self._flying_word, landed)

    def drain(self) -> None:
        """Everything lands."""
        while self.num_flying:
            self.land(1.0)

    def read(self, addr: int, size: int) -> int:
        """`size` bytes as a number."""
        return int(self.load(np.array([addr]), size)[0, 0])

    def write(self, addr: int, size: int, value: int) -> None:
        """The low `size` bytes of a number."""
        bits = np.array([[value & ((1 << 8 * size) - 1)]], _UNSIGNED[size])
        self.store(np.array([addr]), bits)

    def bytes_at(self, addr: int, size: int) -> bytes:
        """A copy."""
        assert self._rights[addr : addr + size].all(), f"{size} bytes at {addr:#x}, outside of every allocation"
        return self._bytes[addr : addr + size].tobytes()

    def _checked(self, addr: np.ndarray[Any, Any], size: int, right: int) -> np.ndarray[Any, Any]:
        """The addresses as indices. Guards are wider than any access: both ends inside is all of it inside."""
        kind = "load" if right == READ else "store"
        first = addr.astype(np.int64)
        wrong = first % size != 0
        assert not wrong.any(), f"{kind} of {size} bytes at {first[wrong][0]:#x}, which is not aligned"
        wrong = (first < 0) | (first + size > self._used)
        if not wrong.any():
            wrong = self._rights[first] & self._rights[first + size - 1] & READ == 0
        assert not wrong.any(), f"{kind} of {size} bytes at {first[wrong][0]:#x}, outside of every allocation"
        wrong = self._rights[first] & right == 0
        assert not wrong.any(), f"{kind} of {size} bytes at {first[wrong][0]:#x}, which is read-only"
        return first
