# SPDX-License-Identifier: Apache-2.0
"""What each step of a grid means: one state of the machine, opened up to be worked on.

Only what a rank's own program decides happens here. What the hardware chooses (when a store lands, when a poll looks)
is in `model_machine`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nvcomm import mailbox
from nvcomm.reference.model_plan import EMPTY, FOREIGN, Entry, Plan
from nvcomm.reference.model_rules import Step, Verdict

Flight = tuple[int, Any, int]  # (cell, value, grid)
Action = tuple[Any, ...]  # (kind, ...)
State = tuple[Any, ...]  # (memory, flights, ranks)

NOT_STARTED, COMPLETED = -1, -2
MARKS = -2  # a marker in flight has MARKS - call where another publish has -1


class Record(NamedTuple):
    """A grid as far as it has come; `pending` holds the polled cells still to collect."""

    pc: int
    slot: int = 0
    generation: int = 0
    triggered: bool = False
    pending: tuple[int, ...] = ()


IDLE_GRID = Record(NOT_STARTED)
DONE_GRID = Record(COMPLETED)

# A rank's status; a rank that gave up has the number of the rank it waited for.
HEALTHY, DEAD = -1, -2


class Violation(Exception):
    """A rank took a wrong word, or the busy word reported an overlap."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict


class Run:
    """One state being worked on.

    Args:
        plan: the fixed part of the scenario.
        state: (memory, flights, ranks), see `model_machine`.
        eager: a poll of a cell to which nothing is in flight happens at once.
        log: what happens is appended here, a line each.
    """

    def __init__(self, plan: Plan, state: State, *, eager: bool, log: list[str] | None = None) -> None:
        memory, flights, ranks = state
        self.plan = plan
        self.rules = plan.rules
        self.eager = eager
        self.log = log
        self.memory = list(memory)
        self.flights = list(flights)
        self.grids = [list(rank[0]) for rank in ranks]
        self.status = [rank[1] for rank in ranks]
        self.entered = [rank[2] for rank in ranks]

    def freeze(self) -> State:
        """The state as tuples."""
        ranks = tuple(zip(map(tuple, self.grids), self.status, self.entered, strict=True))
        return tuple(self.memory), tuple(sorted(self.flights)), ranks

    def note(self, text: str) -> None:
        """Add a line to the log."""
        if self.log is not None:
            self.log.append(text)

    def put(self, rank: int, index: int, pc: int, **changes: Any) -> None:
        """Move a grid to another step."""
        if pc == COMPLETED:
            self.grids[rank][index] = DONE_GRID
            return
        old = self.grids[rank][index]
        self.grids[rank][index] = Record(
            pc,
            changes.get("slot", old.slot),
            changes.get("generation", old.generation),
            changes.get("triggered", old.triggered),
            changes.get("pending", old.pending),
        )

    def settle(self) -> None:
        """Let every rank's program run to where it has to wait for something or somebody."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.plan.world_size):
                if self.status[rank] == DEAD:
                    continue
                for index in range(len(self.grids[rank])):
                    while self.grids[rank][index].pc != COMPLETED and self._advance(rank, index):
                        moved = True

    # Where a grid stands.

    def step(self, rank: int, index: int) -> Step | None:
        """The step a started grid is at; None once it has exited."""
        steps = self.plan.grids[rank][index].steps
        pc = self.grids[rank][index].pc
        return steps[pc] if pc < len(steps) else None

    def exited(self, rank: int, index: int) -> bool:
        """Whether a grid has come to its end; its stores may still be under way."""
        pc = self.grids[rank][index].pc
        return pc == COMPLETED or pc >= len(self.plan.grids[rank][index].steps)

    def held_up_by(self, rank: int, index: int) -> list[Flight]:
        """The flights that have to land before a grid's fence or completion, or the drain or markers of reset()."""
        step = self.step(rank, index)
        if step is None or step == Step.FENCE:
            return [f for f in self.flights if f[2] == index and self.plan.home(f[0]) == rank]
        if step == Step.AWAIT and self.sees_markers_at_once:
            return [f for f in self.flights if f[0] in self.grids[rank][index].pending]
        if step == Step.DRAIN:
            return [f for f in self.flights if f[2] < 0 and f[1] != EMPTY and self.plan.parts(f[1])[2] == rank]
        return []

    def _advance(self, rank: int, index: int) -> bool:
        """One step of one grid, if it can take one without a choice."""
        if self.grids[rank][index].pc == NOT_STARTED:
            return self._start(rank, index)
        step = self.step(rank, index)
        ready = _READY.get(step)
        if ready is not None and not ready(self, rank, index):
            return False
        self.pass_step(rank, index)
        return True

    def _start(self, rank: int, index: int) -> bool:
        plan = self.plan.grids[rank][index]
        if plan.pred is not None:
            if self.rules.pdl:
                may_start = self.exited(rank, plan.pred) or self.grids[rank][plan.pred].triggered
            else:
                lag = self.rules.clears_land
                must_be_over = () if lag is None else self.grids[rank][: max(plan.pred + 1 - lag, 0)]
                may_start = self.exited(rank, plan.pred) and all(grid.pc == COMPLETED for grid in must_be_over)
            if not may_start:
                return False
        name = "a foreign kernel" if plan.call == FOREIGN else f"call {plan.call}"
        if self.status[rank] != HEALTHY and Step.RENEW not in plan.steps and plan.call != FOREIGN:
            self.note(f"rank {rank} is broken and skips {name}")
            self.put(rank, index, COMPLETED)
        else:
            self.note(f"rank {rank} starts {name}")
            self.put(rank, index, 0)
        return True

    def _landed(self, rank: int, index: int) -> bool:
        return not self.held_up_by(rank, index)

    def _everybody_entered(self, rank: int, index: int) -> bool:
        return min(self.entered) >= self.entered[rank]

    def _predecessor_completed(self, rank: int, index: int) -> bool:
        pred = self.plan.grids[rank][index].pred
        return pred is None or self.grids[rank][pred].pc == COMPLETED

    def _block_is_steady(self, rank: int, index: int) -> bool:
        """Whether it is all the same when this grid reads the state block: nothing of this rank may change it now."""
        others = (i for i, grid in enumerate(self.grids[rank]) if i != index and grid.pc >= 0)
        block = self.plan.block(rank)
        return all(self.exited(rank, i) for i in others) and all(flight[0] != block for flight in self.flights)

    def _collected(self, rank: int, index: int) -> bool:
        if self.eager and not self.rules.in_order:
            for cell in self.grids[rank][index].pending:
                cells = self._entry(rank, index, cell).cells
                if self.memory[cell] != EMPTY and not any(flight[0] in cells for flight in self.flights):
                    self.take(rank, index, cell)
        return not self.grids[rank][index].pending

    def see_marker(self, rank: int, index: int, cell: int) -> None:
        """reset(): the poll of a cell sees EMPTY: the marker has landed, everything older has too, and it is armed."""
        self.note(f"rank {rank} sees the marker in {self.plan.describe_cell(cell)}")
        self._uncross(rank, index, cell)

    @property
    def sees_markers_at_once(self) -> bool:
        """Whether it is all the same in which order markers land: nobody publishes before all ranks have seen all."""
        return self.eager and self.rules.reset[-1] == Step.MEET

    def _marked(self, rank: int, index: int) -> bool:
        if self.sees_markers_at_once:
            for cell in self.grids[rank][index].pending:
                if self.memory[cell] == EMPTY:
                    self.see_marker(rank, index, cell)
        return not self.grids[rank][index].pending

    def pass_step(self, rank: int, index: int) -> None:
        """Carry out the step a grid is at, and go on to the next."""
        step = self.step(rank, index)
        if step is None:
            self.put(rank, index, COMPLETED)
            return
        grid = self.grids[rank][index]
        call = self.plan.call(rank, index)
        action = _ACTION.get(step)
        if action is not None:
            action(self, rank, index, call, grid)
        self.put(rank, index, grid.pc + 1)

    # The steps that do something. The others (WAIT, COLLECT, FENCE, DRAIN, MEET, AWAIT) only hold the grid up.

    def _step_read(self, rank: int, index: int, call: int, grid: Record) -> None:
        slot, generation, _ = self.memory[self.plan.block(rank)]
        if self.rules.slot_from == "host":
            slot = self.plan.first_block[0]
        elif self.rules.slot_from == "generation":
            slot = generation % self.plan.num_slots
        collects = Step.COLLECT in self.plan.grids[rank][index].steps
        pending = tuple(sorted(self.plan.entries[call, slot, rank])) if collects else ()
        self.note(f"rank {rank} call {call} reads slot {slot}, generation {generation:#x}")
        self.put(rank, index, grid.pc, slot=slot, generation=generation, pending=pending)

    def _step_lock(self, rank: int, index: int, call: int, grid: Record) -> None:
        slot, generation, busy = self.memory[self.plan.block(rank)]
        if busy:
            raise Violation(Verdict.OVERLAP, f"rank {rank} call {call} finds the mailbox busy")
        self.memory[self.plan.block(rank)] = (slot, generation, True)

    def _step_unlock(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.memory[self.plan.block(rank)] = (*self.memory[self.plan.block(rank)][:2], False)

    def _step_publish(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} publishes call {call} into slot {grid.slot}")
        for store in self.plan.stores[call, grid.slot, rank]:
            if not store.needs:
                self._publish(store.cell, store.value)

    def _step_clear(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} call {call} clears another call's words")
        self.flights += [(cell, EMPTY, index) for cell in self.plan.cleared[call, grid.slot, rank]]

    def _step_advance(self, rank: int, index: int, call: int, grid: Record) -> None:
        busy = self.memory[self.plan.block(rank)][2]
        block = (self.plan.next_slot[grid.slot], mailbox.next_generation(grid.generation), busy)
        self.note(f"rank {rank} call {call} advances to slot {block[0]}")
        if self.rules.pdl:
            self.flights.append((self.plan.block(rank), block, index))
        else:
            self.memory[self.plan.block(rank)] = block

    def _step_trigger(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} call {call} triggers")
        self.put(rank, index, grid.pc, triggered=True)

    def _step_arrive(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.entered[rank] += 1
        self.note(f"rank {rank} enters barrier {self.entered[rank]}")

    def _step_mark(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} publishes markers")
        for cell in self.plan.own_rows(rank):
            self._publish(cell, EMPTY, MARKS - call)
        self.put(rank, index, grid.pc, pending=tuple(self.plan.all_cells(rank)))

    def _step_blank(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} blanks its mailbox")
        self.flights += [(cell, self.plan.blank(call, cell), index) for cell in self.plan.all_cells(rank)]

    def _step_arm(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} arms its mailbox")
        self.flights += [(cell, EMPTY, index) for cell in self.plan.all_cells(rank)]

    def _step_renew(self, rank: int, index: int, call: int, grid: Record) -> None:
        self.note(f"rank {rank} renews slot and generation")
        slot = 0 if self.rules.reset_slot else self.memory[self.plan.block(rank)][0]
        self.memory[self.plan.block(rank)] = (slot, self.plan.agreed_generation, False)
        self.status[rank] = HEALTHY

    # Words.

    def _publish(self, cell: int, value: int, grid: int = -1) -> None:
        if self.status[self.plan.home(cell)] != DEAD:
            self.flights.append((cell, value, grid))

    def _entry(self, rank: int, index: int, cell: int) -> Entry:
        call, slot = self.plan.call(rank, index), self.grids[rank][index].slot
        return self.plan.entries[call, slot, rank][cell]

    def _uncross(self, rank: int, index: int, cell: int) -> tuple[int, ...]:
        grid = self.grids[rank][index]
        pending = tuple(c for c in grid.pending if c != cell)
        self.put(rank, index, grid.pc, pending=pending)
        return pending

    def land(self, flight: Flight) -> None:
        """A store in flight reaches its memory."""
        cell, value, _ = flight
        self.flights.remove(flight)
        self.memory[cell] = value
        what = f"slot {value[0]}" if isinstance(value, tuple) else self.plan.describe(value)
        self.note(f"lands: {what}, in {self.plan.describe_cell(cell)}")

    def take(self, rank: int, index: int, cell: int) -> None:
        """The poll of a cell sees a word: hand it on, clear it, and send what waited for it.

        Raises:
            Violation: the word is not the one that belongs here.
        """
        call, slot = self.plan.call(rank, index), self.grids[rank][index].slot
        entry = self._entry(rank, index, cell)
        for place, wanted, clears in zip(entry.cells, entry.wanted, entry.clears, strict=True):
            seen = self.memory[place]
            text = f"rank {rank} call {call} takes {self.plan.describe(seen)}, from {self.plan.describe_cell(place)}"
            self.note(text)
            if seen != wanted:
                verdict = Verdict.TORN if seen == EMPTY else Verdict.STALE
                raise Violation(verdict, f"{text}; wanted {self.plan.describe(wanted)}")
            if clears:
                self.flights.append((place, EMPTY, index))
        pending = self._uncross(rank, index, cell)
        for store in self.plan.stores[call, slot, rank]:
            if cell in store.needs and store.needs.isdisjoint(pending):
                self.note(f"rank {rank} publishes {self.plan.describe(store.value)}")
                self._publish(store.cell, store.value)


# What holds a grid up at a step, and what a step does.
_READY = {
    None: Run._landed,
    Step.FENCE: Run._landed,
    Step.DRAIN: Run._landed,
    Step.WAIT: Run._predecessor_completed,
    Step.READ: Run._block_is_steady,
    Step.MEET: Run._everybody_entered,
    Step.COLLECT: Run._collected,
    Step.AWAIT: Run._marked,
}
_ACTION = {
    Step.READ: Run._step_read,
    Step.LOCK: Run._step_lock,
    Step.PUBLISH: Run._step_publish,
    Step.CLEAR: Run._step_clear,
    Step.ADVANCE: Run._step_advance,
    Step.UNLOCK: Run._step_unlock,
    Step.TRIGGER: Run._step_trigger,
    Step.ARRIVE: Run._step_arrive,
    Step.MARK: Run._step_mark,
    Step.BLANK: Run._step_blank,
    Step.ARM: Run._step_arm,
    Step.RENEW: Run._step_renew,
}
