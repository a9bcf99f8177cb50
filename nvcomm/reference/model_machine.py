# SPDX-License-Identifier: Apache-2.0
"""The machine: memories, stores in flight, and everything that the hardware may do next.

A state is three tuples:

    memory    one value per cell, then one state block (slot, generation, busy) per rank
    flights   stores that were issued and have not landed: (cell, value, grid), sorted. `grid` is the issuing grid for a
              store to the own memory (a clear, the state block) and -1 for a publish
    ranks     per rank: a record for each grid, the status, how many barriers it entered

An *action* is what the hardware may do at any moment: a flight lands, a poll sees what is there, a grid reads its slot,
a rank gives up, a rank dies. Flights land in any order, each destination and each word for itself. What only a rank's
own program decides (start, publish, advance, trigger, exit) happens as soon as it can: later would add nothing, since
what it issues may stay in flight for as long as the search likes.

The `reduced` machine leaves out orders that cannot matter. A flight lands only when its cell is polled, or when another
flight goes to the same cell (then in both orders). A poll of a cell to which nothing is in flight happens at once. Own
stores that nobody races land together, when the fence or the end of their grid needs them. Each is safe because a cell
that nobody polls and nothing else goes to looks the same to everybody, before and after; tests/model compares the
verdicts of both machines.
"""

from __future__ import annotations

from collections import Counter

from nvcomm.reference.model_plan import EMPTY, Plan, Scenario
from nvcomm.reference.model_rules import Step, Verdict
from nvcomm.reference.model_steps import (
    COMPLETED,
    DEAD,
    DONE_GRID,
    HEALTHY,
    IDLE_GRID,
    MARKS,
    Action,
    Flight,
    Run,
    State,
)
from nvcomm.reference.model_traffic import RESULT

LAND, DROP, TAKE, READ, FLUSH, GIVE_UP, DIE = "land", "drop", "take", "read", "flush", "give up", "die"


class Machine:
    """The transition system of one scenario.

    Args:
        scenario: what to run.
        reduced: leave out orders that cannot matter. A poll at once is sound because a word that was overwritten before
            it was seen could as well have landed after the one that overwrote it; not so where stores stay in order
            (A2), so there a collect polls when the search says so.
    """

    def __init__(self, scenario: Scenario, *, reduced: bool = True) -> None:
        self.plan = Plan(scenario)
        self.scenario = scenario
        self.rules = scenario.rules
        self.reduced = reduced
        self._in_order = self.rules.in_order
        resets = [i for i, call in enumerate(scenario.calls) if call.op == "reset"]
        self._patient_from = max(resets, default=len(scenario.calls))

    def _open(self, state: State, log: list[str] | None = None) -> Run:
        return Run(self.plan, state, eager=self.reduced, log=log)

    def initial(self, log: list[str] | None = None) -> State:
        """All words EMPTY, and every rank at its first wait."""
        memory = (EMPTY,) * self.plan.num_cells + (self.plan.first_block,) * self.plan.world_size
        ranks = tuple(((IDLE_GRID,) * len(grids), HEALTHY, 0) for grids in self.plan.grids)
        run = self._open((memory, (), ranks), log)
        run.settle()
        return run.freeze()

    # What may happen next.

    def actions(self, state: State) -> list[Action]:
        """Everything that may happen next."""
        run = self._open(state)
        crowd = Counter(flight[0] for flight in run.flights)
        polled = self._polled(run) if self.reduced else frozenset()
        found: list[Action] = []
        for flight in dict.fromkeys(run.flights):
            cell = flight[0]
            if self._in_order and self._overtakes(run, flight):
                continue
            if not self.reduced or crowd[cell] > 1 or cell in polled or cell >= self.plan.num_cells:
                found.append((LAND, flight))
                if self._from_the_dead(run, flight):
                    found.append((DROP, flight))
        for rank, index in self._active(run):
            step = run.step(rank, index)
            if step == Step.COLLECT:
                found += [(TAKE, rank, index, c) for c in run.grids[rank][index].pending if run.memory[c] != EMPTY]
            elif step == Step.AWAIT and not run.sees_markers_at_once:
                found += [(TAKE, rank, index, c) for c in run.grids[rank][index].pending if run.memory[c] == EMPTY]
            elif step == Step.READ:
                found.append((READ, rank, index))
            elif self.reduced:
                waited = run.held_up_by(rank, index)
                if waited and all(crowd[flight[0]] == 1 for flight in waited):
                    found.append((FLUSH, rank, index))
        if self.scenario.timeouts != "none":
            found += self._failures(run, found)
        return found

    @staticmethod
    def _active(run: Run) -> list[tuple[int, int]]:
        return [
            (rank, index)
            for rank, grids in enumerate(run.grids)
            if run.status[rank] != DEAD
            for index, grid in enumerate(grids)
            if grid.pc >= 0
        ]

    def _polled(self, run: Run) -> set[int]:
        """Cells that somebody looks at now."""
        cells: set[int] = set()
        for rank, index in self._active(run):
            grid = run.grids[rank][index]
            if run.step(rank, index) == Step.COLLECT:
                entries = self.plan.entries[self.plan.call(rank, index), grid.slot, rank]
                for cell in grid.pending:
                    cells.update(entries[cell].cells)
            elif not run.sees_markers_at_once:
                cells.update(grid.pending)  # the words whose markers are awaited
        return cells

    def _overtakes(self, run: Run, flight: Flight) -> bool:
        """A2: whether an older publish of the same rank to the same cell is still in flight."""
        if flight[2] >= 0:
            return False
        mine = self._sent_by(flight)
        others = (self._sent_by(other) for other in run.flights if other[0] == flight[0] and other[2] < 0)
        return any(source == mine[0] and call < mine[1] for source, call in others)

    def _sent_by(self, flight: Flight) -> tuple[int, int]:
        """The rank that published a flight, and in which call."""
        cell, value, grid = flight
        if grid <= MARKS:
            return self.plan.cell_names[cell][2], MARKS - grid
        call, _, source = self.plan.parts(value)
        return source, call

    def _failures(self, run: Run, found: list[Action]) -> list[Action]:
        """Deaths, and ranks that give up waiting (R10)."""
        actions: list[Action] = []
        someone_died = DEAD in run.status
        if not someone_died:
            actions += [(DIE, r) for r in self.scenario.mortal if any(g.pc != COMPLETED for g in run.grids[r])]
        if self.scenario.timeouts == "any" or (someone_died and not found):
            for rank, index in self._active(run):
                if run.step(rank, index) == Step.COLLECT and self.plan.call(rank, index) < self._patient_from:
                    actions += [(GIVE_UP, rank, index, source) for source in self._waited_for(run, rank, index)]
        return actions

    def _waited_for(self, run: Run, rank: int, index: int) -> list[int]:
        grid = run.grids[rank][index]
        entries = self.plan.entries[self.plan.call(rank, index), grid.slot, rank]
        sources = {self.plan.parts(entries[cell].wanted[-1])[2] for cell in grid.pending}
        if self.rules.report == "peers first":  # its own word is late because another's is
            sources = sources - {rank} or sources
        return sorted(sources)

    def _from_the_dead(self, run: Run, flight: Flight) -> bool:
        _, value, grid = flight
        return grid < 0 and value != EMPTY and run.status[self.plan.parts(value)[2]] == DEAD

    # Doing it.

    def apply(self, state: State, action: Action, log: list[str] | None = None) -> State:
        """The state after an action and all that follows of itself.

        Args:
            state: a state.
            action: one of `actions(state)`.
            log: what happens is appended here, a line each.

        Raises:
            Violation: a rank took a wrong word, or the busy word reported an overlap.
        """
        run = self._open(state, log)
        kind = action[0]
        if kind == LAND:
            run.land(action[1])
        elif kind == DROP:
            run.flights.remove(action[1])
            run.note(f"never lands: {self.plan.describe(action[1][1])}, in {self.plan.describe_cell(action[1][0])}")
        elif kind == DIE:
            self._bury(run, action[1])
        else:
            rank, index = action[1:3]
            if kind == FLUSH:
                for flight in run.held_up_by(rank, index):
                    run.land(flight)
            elif kind == TAKE:
                take = run.take if run.step(rank, index) == Step.COLLECT else run.see_marker
                take(rank, index, action[3])
            elif kind == READ:
                run.pass_step(rank, index)
            else:
                self._give_up(run, rank, index, action[3])
        run.settle()
        return run.freeze()

    def _bury(self, run: Run, rank: int) -> None:
        """A dead rank runs no further. What it sent may land or not; what is sent to it does not matter."""
        run.note(f"rank {rank} dies")
        run.status[rank] = DEAD
        run.grids[rank] = [DONE_GRID] * len(run.grids[rank])
        run.flights = [flight for flight in run.flights if self.plan.home(flight[0]) != rank]

    def _give_up(self, run: Run, rank: int, index: int, source: int) -> None:
        """R10: record whom it waited for, fill the rest, publish nothing more, end."""
        run.note(f"rank {rank} gives up waiting for rank {source}")
        run.status[rank] = source
        run.put(rank, index, len(self.plan.grids[rank][index].steps), pending=())

    # How it ended.

    def ended(self, state: State) -> tuple[Verdict, str]:
        """The verdict on a state in which nothing can happen any more."""
        run = self._open(state)
        waiting = self._active(run)
        if waiting or any(grid.pc != COMPLETED for grids in run.grids for grid in grids):
            return self._stuck(run, waiting)
        if DEAD in run.status:
            return self._reports(run)
        return self._audit(run)

    def _stuck(self, run: Run, waiting: list[tuple[int, int]]) -> tuple[Verdict, str]:
        for rank, index in waiting:
            grid = run.grids[rank][index]
            if run.step(rank, index) == Step.AWAIT:
                where = self.plan.describe_cell(grid.pending[0])
                return Verdict.LOST, f"rank {rank} waits for ever for the marker in {where}"
            if run.step(rank, index) != Step.COLLECT:
                continue
            entries = self.plan.entries[self.plan.call(rank, index), grid.slot, rank]
            for cell in grid.pending:
                wanted = entries[cell].wanted[-1]
                if self._was_sent(run, wanted):
                    return Verdict.LOST, f"rank {rank} waits for ever for {self.plan.describe(wanted)}, which was sent"
        return Verdict.DEADLOCK, f"ranks {sorted({rank for rank, _ in waiting})} wait for ever"

    def _was_sent(self, run: Run, value: int) -> bool:
        call, kind, source = self.plan.parts(value)
        for index, grid in enumerate(self.plan.grids[source]):
            if grid.call == call and Step.PUBLISH in grid.steps:
                record = run.grids[source][index]
                past = record.pc == COMPLETED or record.pc > grid.steps.index(Step.PUBLISH)
                return past and (kind != RESULT or not record.pending)
        return False

    def _reports(self, run: Run) -> tuple[Verdict, str]:
        """R10: from every rank that gave up, "waited for" leads to the rank that is gone."""
        dead = run.status.index(DEAD)
        for rank, status in enumerate(run.status):
            seen = set()
            at = rank
            while run.status[at] >= 0 and at not in seen:
                seen.add(at)
                at = run.status[at]
            if status >= 0 and at != dead:
                return Verdict.MISNAMED, f"the report of rank {rank} leads to rank {at}, but rank {dead} is gone"
        return Verdict.OK, ""

    def _audit(self, run: Run) -> tuple[Verdict, str]:
        if not self.scenario.audit or any(status != HEALTHY for status in run.status):
            return Verdict.OK, ""
        blocks = set(run.memory[self.plan.num_cells :])
        if len(blocks) > 1:
            return Verdict.DIRTY, f"ranks end at different slots and generations: {sorted(blocks)}"
        left = [cell for cell in range(self.plan.num_cells) if run.memory[cell] != EMPTY]
        left += [flight[0] for flight in run.flights]
        if left:
            return Verdict.DIRTY, f"never collected: {self.plan.describe_cell(left[0])}"
        return Verdict.OK, ""
