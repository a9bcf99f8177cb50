# SPDX-License-Identifier: Apache-2.0
"""Breaks of the host code, at least one for each rule of docs/mailbox.md that it keeps.

Beside `nvcomm.host.mutations`, whose switches show that a test *can* fail, these change the code that users run: each
has to be caught by the test of the rule as it stands.
"""

from __future__ import annotations

from tests.mutation import Edit, Mutant

STEPS = "nvcomm/host/steps.py"
ENGINE = "nvcomm/host/engine.py"
RULES = "tests/host/test_rules.py"
FAULTS = "tests/host/test_faults.py"
CLEAR = "        clear_words(row.words[start:stop])\n"
LATE_CLEAR = (
    '        due, self._due = getattr(self, "_due", None), row.words[start:stop]\n'
    "        if due is not None:\n"
    "            clear_words(due)\n"
)
SOURCES = "        return [(rank + i) % world_size for i in range(world_size)]\n"
FINISH = '        """A gather has collected everything that it waits for; its own row came like any other (R2)."""\n'
# Mutants of which the test learns by a timeout alone: it need not be the ten seconds of a loaded machine.
HURRY = Edit(ENGINE, "mailboxes, carrier, timeout_s, counts)", "mailboxes, carrier, min(timeout_s, 2.0), counts)")
COMPARE = "other = next((rank for rank, seen in calls.items() if seen != call), None)"

MUTANTS = (
    Mutant(
        "R1",
        "a block is cleared when the next one is collected, behind a publish",
        (Edit(STEPS, CLEAR, LATE_CLEAR), HURRY),
        f"{RULES}::test_R1_clears_land_before_the_next_publish[on]",
    ),
    Mutant(
        "R1",
        "no barrier between clears and publish",
        (Edit("nvcomm/host/words.py", "    with threading.Lock():\n        pass\n", ""),),
        "tests/host/test_words.py::test_R1_barrier_takes_a_lock",
    ),
    Mutant(
        "R2",
        "the own row is taken from registers",
        (
            Edit(STEPS, SOURCES, SOURCES.replace("range(world_size)", "range(1, world_size)")),
            Edit(STEPS, FINISH, FINISH + "        out[self.port.rank] = payload\n"),
        ),
        f"{RULES}::test_R2_a_rank_waits_for_its_own_copy[on]",
    ),
    Mutant(
        "R3",
        "the last word of a block is not cleared",
        (Edit(STEPS, CLEAR, CLEAR.replace("stop]", "stop - 1]")),),
        f"{RULES}::test_R3_clear_exactly_what_was_collected[on]",
    ),
    Mutant(
        "R4",
        "a block counts as arrived when its last word has",
        (Edit(STEPS, "return first_empty(block)", "return len(block) - 1 if first_empty(block[-1:]) >= 0 else -1"),),
        f"{RULES}::test_R4_every_word_is_its_own_flag[on]",
    ),
    Mutant(
        "R4",
        "a word is stored twice",
        (
            Edit(
                "nvcomm/host/words.py",
                "    np.bitwise_or(words, _ZERO, out=target)\n",
                "    np.copyto(target, words)\n",
            ),
        ),
        "tests/host/test_words.py::test_R4_a_word_is_stored_once[large]",
    ),
    Mutant(
        "R5",
        "reserved words travel as payload",
        (Edit(STEPS, "        return escapes.escape(words)\n", "        return words, [], 0\n"), HURRY),
        "tests/host/test_all_gather.py::test_R5_reserved_words_are_restored[both]",
    ),
    Mutant(
        "R6",
        "every call uses slot 0",
        (Edit(STEPS, "state[STATE_SLOT] = next_slot(int(state[STATE_SLOT]))", "state[STATE_SLOT] = 0"), HURRY),
        f"{RULES}::test_R6_slots_are_used_in_turn[on]",
    ),
    Mutant(
        "R7",
        "a second thread is let in",
        (Edit(ENGINE, 'blocking=False) and "R7" not in self._mutations:', "blocking=False) and self._closed:"),),
        f"{RULES}::test_R7_overlapping_calls_are_refused[on]",
    ),
    Mutant(
        "R10",
        "a wait lasts three times as long as asked",
        (
            Edit(
                "nvcomm/host/waiting.py",
                "if self.waited_s >= self._timeout_s:",
                "if self.waited_s >= 3 * self._timeout_s:",
            ),
        ),
        "tests/host/test_fault_table.py::test_it_ends_as_it_has_to[never arrives]",
    ),
    Mutant(
        "R10",
        "a broken rank goes on as if nothing had happened",
        (
            Edit(
                ENGINE,
                "            if error := self.fault():\n                result",
                "            if error := None:\n                result",
            ),
        ),
        f"{FAULTS}::test_a_broken_rank_fills_its_output_and_raises_the_same_again",
    ),
    Mutant(
        "R10",
        "a rank that gives up tells no other rank",
        (
            Edit(
                STEPS,
                "        for mailbox in self.port.mailboxes:\n            fault",
                "        for mailbox in (self.port.own,):\n            fault",
            ),
        ),
        f"{FAULTS}::test_the_root_is_found_through_the_fault_rows",
    ),
    Mutant(
        "R10b",
        "reset() leaves the words of the call that failed",
        (Edit("nvcomm/host/recovery.py", "        clear_words(port.own.armed)  # (3)\n", "        pass\n"),),
        f"{RULES}::test_R10b_reset_empties_the_mailboxes[on]",
    ),
    Mutant(
        "R11",
        "headers are exchanged and not compared",
        (Edit(STEPS, COMPARE, "other = None"),),
        f"{RULES}::test_R11_ranks_agree_on_the_call[on]",
    ),
    Mutant(
        "R12",
        "an empty call takes a slot and waits for nobody",
        (Edit("nvcomm/host/all_gather.py", "        steps.empty_call()\n", "        steps.step()\n"), HURRY),
        f"{RULES}::test_R12_an_empty_call_advances_nothing[on]",
    ),
    Mutant(
        "R12",
        "a rank that owns no row is sent nothing",
        (Edit("nvcomm/host/reduce_scatter.py", "_TOKEN = slice(0, 1)", "_TOKEN = slice(0, 0)"),),
        "tests/host/test_reduce.py::test_R12_a_rank_that_owns_no_row_still_waits_for_everybody[1]",
    ),
    Mutant(
        "R13",
        "ranks are added one after the other",
        (
            Edit(
                "nvcomm/host/reduce.py",
                "    split = 1 << (len(parts) - 1).bit_length() - 1\n",
                "    split = len(parts) - 1\n",
            ),
        ),
        "tests/host/test_reduce.py::test_R13_all_reduce_is_the_reference_for_both_protocols[5-torch.float32]",
    ),
)
