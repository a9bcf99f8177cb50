# SPDX-License-Identifier: Apache-2.0
"""A scenario, and everything about it that does not change while it runs: cells, stores, expected words, grids.

Slots and rows come from `nvcomm.mailbox`: a cell is a byte address that `MailboxLayout` gave, so a layout in which two
rows overlap makes two words share a cell, as it would on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations, product

from nvcomm import mailbox
from nvcomm.mailbox import CHUNK_WORDS, WORD_BYTES, MailboxLayout
from nvcomm.reference.model_rules import PROTOCOL, Rules, Step
from nvcomm.reference.model_traffic import BLANK, DATA, KIND_NAMES, RAW, RECORD, Call, Send, traffic

EMPTY = 0
FIRST_GENERATION = 0xFFFFFFFE  # every run wraps the 32-bit count (R6)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one configuration runs.

    Args:
        world_size: ranks.
        calls: the program; all ranks run it.
        rules: the protocol, or the protocol with switches changed.
        timeouts: "none"; "stuck" (a rank gives up when nothing but a dead rank could help it); "any" (at any time, in
            calls before the last reset: after it everything has to work).
        mortal: ranks that may die at any moment.
        audit: at the end every mailbox has to be empty and every rank at the same slot and generation.
    """

    world_size: int
    calls: tuple[Call, ...]
    rules: Rules = PROTOCOL
    timeouts: str = "none"
    mortal: frozenset[int] = frozenset()
    audit: bool = True


FOREIGN = -1


@dataclass(frozen=True, slots=True)
class Grid:
    """One kernel of a rank's stream: the call it serves (FOREIGN: somebody else's kernel) and its steps."""

    call: int
    steps: tuple[Step, ...]
    pred: int | None  # the grid before it in its stream


@dataclass(frozen=True, slots=True)
class Entry:
    """What the collector of one polled word reads: cells, the values they have to hold, and which it clears."""

    cells: tuple[int, ...]
    wanted: tuple[int, ...]
    clears: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """A publish: the cell it goes to, the value, and the own cells that have to be collected first."""

    cell: int
    value: int
    needs: frozenset[int]


@contextmanager
def slots(num_slots: int) -> Iterator[None]:
    """Let `nvcomm.mailbox` count with another number of slots while a plan is made."""
    saved, mailbox.NUM_SLOTS = mailbox.NUM_SLOTS, num_slots
    try:
        yield
    finally:
        mailbox.NUM_SLOTS = saved


class Plan:
    """The fixed part of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world_size = scenario.world_size
        self.rules = scenario.rules
        self.num_slots = scenario.rules.num_slots
        self.sends = tuple(traffic(call, self.world_size, self.rules) for call in scenario.calls)
        self._cell_of: dict[tuple[int, int], int] = {}
        self.cell_names: list[tuple[int, int, int, int, bool]] = []  # (dst, slot, row, place, is a record)
        with slots(self.num_slots):
            words = max((c.extent for c in scenario.calls), default=1) + 1
            self._layout = MailboxLayout(self.world_size, words * WORD_BYTES)
            self.next_slot = tuple(mailbox.next_slot(slot) for slot in range(self.num_slots))
            self.first_block = (FIRST_GENERATION % self.num_slots, FIRST_GENERATION, False)
            self.agreed_generation = FIRST_GENERATION
            for _ in scenario.calls:
                self.agreed_generation = mailbox.next_generation(self.agreed_generation)
            spots = list(product(range(len(self.sends)), range(self.num_slots)))
            self.stores = {(c, s, r): self._stores(c, s, r) for c, s in spots for r in range(self.world_size)}
            self.entries = {(c, s, r): self._entries(c, s, r) for c, s in spots for r in range(self.world_size)}
            self.cleared = {(c, s, r): self._cleared(c, s, r) for c, s in spots for r in range(self.world_size)}
        self.num_cells = len(self.cell_names)
        self.grids = tuple(self._stream(rank) for rank in range(self.world_size))

    # Values: 0 is EMPTY; any other word carries the call, the kind and the rank it comes from.

    def value(self, call: int, kind: int, src_rank: int) -> int:
        """The word that `src_rank` sends in a call."""
        return 1 + (call * len(KIND_NAMES) + kind) * self.world_size + src_rank

    def parts(self, value: int) -> tuple[int, int, int]:
        """(call, kind, src_rank) of a word that is not EMPTY."""
        rest, src_rank = divmod(value - 1, self.world_size)
        call, kind = divmod(rest, len(KIND_NAMES))
        return call, kind, src_rank

    def describe(self, value: int) -> str:
        """A word in words."""
        if value == EMPTY:
            return "EMPTY"
        call, kind, src_rank = self.parts(value)
        return f"the {KIND_NAMES[kind]} of rank {src_rank}, call {call}"

    def describe_cell(self, cell: int) -> str:
        """A place in a mailbox in words."""
        if cell >= self.num_cells:
            return f"the state block of rank {cell - self.num_cells}"
        dst, slot, row, place, is_record = self.cell_names[cell]
        return f"mailbox {dst} slot {slot} row {row} {'record' if is_record else 'word'} {place}"

    # Addresses.

    def _cell(self, dst_rank: int, slot: int, row: int, place: int, extent: int, *, is_record: bool) -> int:
        layout = self._layout
        if is_record:
            offset = layout.record_offset(0 if self.rules.escape == "shared" else slot, row, 0)
        elif self.rules.rows == "packed":
            offset = layout.row_offset(slot, 0) + (row * extent + place) * WORD_BYTES
        else:
            offset = layout.row_offset(slot, row) + place * WORD_BYTES
        key = (dst_rank, offset)
        if key not in self._cell_of:
            self._cell_of[key] = len(self.cell_names)
            self.cell_names.append((dst_rank, slot, row, place, is_record))
        return self._cell_of[key]

    def _cell_of_send(self, call: int, slot: int, send: Send) -> int:
        extent = self.scenario.calls[call].extent
        return self._cell(send.dst_rank, slot, send.row, send.place, extent, is_record=send.kind == RECORD)

    def _stores(self, call: int, slot: int, rank: int) -> tuple[Store, ...]:
        extent = self.scenario.calls[call].extent
        return tuple(
            Store(
                self._cell_of_send(call, slot, send),
                EMPTY if send.kind == RAW else self.value(call, send.kind, rank),
                frozenset(self._cell(rank, slot, r, p, extent, is_record=False) for r, p in send.needs),
            )
            for send in self.sends[call]
            if send.src_rank == rank
        )

    def _entries(self, call: int, slot: int, rank: int) -> dict[int, Entry]:
        """Polled cell -> what its collector takes. With R4 that is the cell itself."""
        chunks: dict[tuple[int, int, bool], list[Send]] = {}
        for send in self.sends[call]:
            if send.dst_rank == rank and send.collected:
                together = send.place // (1 if self.rules.atom == "word" else CHUNK_WORDS)
                chunks.setdefault((send.row, together, send.kind == RECORD), []).append(send)
        entries = {}
        for sends in chunks.values():
            cells = tuple(self._cell_of_send(call, slot, send) for send in sends)
            wanted = tuple(self.value(call, DATA if s.kind == RAW else s.kind, s.src_rank) for s in sends)
            clears = tuple(
                self.rules.clear == "collected" and not (s.kind == RECORD and self.rules.escape == "kept")
                for s in sends
            )
            entries[cells[-1]] = Entry(cells, wanted, clears)
        return entries

    def _cleared(self, call: int, slot: int, rank: int) -> tuple[int, ...]:
        """What step CLEAR of a call in `slot` stores EMPTY over, in protocols that clear by other rules than R3."""
        behind = 1 if self.rules.clear.startswith("previous") else self.num_slots - 1
        victim = call - behind  # the last call that used the slot in question
        target = slot
        for _ in range(self.num_slots - 1 if self.rules.clear.startswith("previous") else 1):
            target = self.next_slot[target]
        if self.rules.clear == "collected" or victim < 0:
            return ()
        extent_of = call if self.rules.clear == "previous by current size" else victim
        cells = (self._cell_of_send(extent_of, target, send) for send in self.sends[extent_of] if send.dst_rank == rank)
        return tuple(sorted(set(cells)))

    def call(self, rank: int, index: int) -> int:
        """The call that a grid serves."""
        return self.grids[rank][index].call

    def home(self, cell: int) -> int:
        """The rank in whose memory a cell or state block lies."""
        return self.cell_names[cell][0] if cell < self.num_cells else cell - self.num_cells

    def block(self, rank: int) -> int:
        """The cell of a rank's state block."""
        return self.num_cells + rank

    def all_cells(self, rank: int) -> list[int]:
        """Every cell of a rank's mailbox."""
        return [cell for cell, name in enumerate(self.cell_names) if name[0] == rank]

    def own_rows(self, rank: int) -> list[int]:
        """Every cell, in any mailbox, of the rows that `rank` writes: where its markers go."""
        return [cell for cell, name in enumerate(self.cell_names) if name[2] == rank]

    def blank(self, call: int, cell: int) -> int:
        """What reset() stores into a cell of the own mailbox before the markers come: any word that is not EMPTY."""
        return self.value(call, BLANK, self.cell_names[cell][2])

    # Streams.

    def _stream(self, rank: int) -> tuple[Grid, ...]:
        rules = self.rules
        order = list(range(len(self.sends)))
        if rules.order == "swapped" and rank == self.world_size - 1:
            order[0], order[1] = order[1], order[0]
        grids: list[Grid] = []
        for call in order:
            if grids and rules.between is not None:
                grids.append(Grid(FOREIGN, rules.between, len(grids) - 1))
            if self.scenario.calls[call].op == "reset":
                kernels: tuple[tuple[Step, ...], ...] = (rules.reset,)
            elif self.sends[call]:
                kernels = rules.grids
            else:  # R12: a call in which nobody sends
                kernels = ((Step.READ, Step.ADVANCE),) if rules.empty_call == "advances" else ((),)
            for steps in kernels:
                alone = not grids or rules.order == "overlap"
                grids.append(Grid(call, steps, None if alone else len(grids) - 1))
        return tuple(grids)

    # Symmetry: renumberings of the ranks that leave the program as it is.

    def symmetries(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pairs (rank -> rank, cell -> cell), the identity left out."""
        place_of = {name: cell for cell, name in enumerate(self.cell_names)}
        for perm in permutations(range(self.world_size)):
            if perm == tuple(range(self.world_size)) or self.rules.rows == "packed" or self.scenario.mortal:
                continue
            if any(self._moved(sends, perm) != set(sends) for sends in self.sends) or self.rules.order == "swapped":
                continue
            yield perm, tuple(place_of[perm[d], s, perm[r], p, rec] for d, s, r, p, rec in self.cell_names)

    @staticmethod
    def _moved(sends: tuple[Send, ...], perm: tuple[int, ...]) -> set[Send]:
        return {
            Send(perm[s.src_rank], perm[s.dst_rank], perm[s.row], s.place, s.kind,
                 tuple(sorted((perm[r], p) for r, p in s.needs)), s.collected)
            for s in sends
        }  # fmt: skip
