# SPDX-License-Identifier: Apache-2.0
"""The negative control: a short run of a protocol that is known to be wrong. If it shows nothing, neither does the run.

`late-copy` is the widely used Lamport all-gather as a whole: rows packed by the call's size, the own row taken from
registers, and the own copy landing after the next call's clear (docs/mailbox.md R2, R3). On sizes that change it hands
out words of earlier gathers. A harness that does not see them would not see ours either.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvcomm.mailbox import NUM_SLOTS
from stress.decode import SUM_KINDS, BadWord
from stress.oracle import GATHERS_PER_REPLAY
from stress.run import Outcome, Progress, ProtocolName, RunConfig, Runner

PROTOCOL: ProtocolName = "late-copy"
# A control stops at the first wrong word; these bound one that finds none.
CONTROL_REPLAYS = 20_000
CONTROL_SECONDS = 60.0  # a busy machine makes a few replays a second
CONTROL_TIMEOUT_S = 3.0
CONTROL_ATTEMPTS = 4
STALE_KINDS = {"stale", "addend", *SUM_KINDS}


@dataclass(frozen=True, slots=True)
class Control:
    """What the control did.

    Attributes:
        outcome: what it saw.
    """

    outcome: Outcome

    @property
    def failed_as_it_must(self) -> bool:
        """Whether it saw a word that an earlier gather had sent, not just any damage.

        A word of a sum, or one that was sent for a sum, names no origin. Then it must not come too soon: no slot holds
        an earlier word before its second use, so a sum that is wrong at once was formed or compared wrongly.
        """
        first = self.outcome.first_bad
        if self.outcome.bad_words == 0 or first is None or first.kind not in STALE_KINDS:
            return False
        return first.expected.replay * GATHERS_PER_REPLAY + first.expected.gather >= NUM_SLOTS

    @property
    def replays_to_fail(self) -> int:
        """Replays until the first wrong word, its own included; 0 where there was none."""
        first = self.outcome.first_bad
        return 0 if first is None else first.expected.replay + 1

    @property
    def summary(self) -> str:
        """For people."""
        outcome = self.outcome
        if self.failed_as_it_must:
            seen = f"first in replay {self.replays_to_fail - 1:,}, {outcome.bad_words:,} wrong words"
            return f"{PROTOCOL} failed as it must: {seen} ({outcome.seconds:.1f} s)"
        return f"{PROTOCOL} did NOT show a stale word in {outcome.gathers:,} collectives: nothing is proven"

    def as_json(self) -> dict[str, object]:
        """A JSON object."""
        first: BadWord | None = self.outcome.first_bad
        return {
            "protocol": PROTOCOL,
            "failed_as_it_must": self.failed_as_it_must,
            "replays": self.outcome.replays,
            "gathers": self.outcome.gathers,
            "bad_words": self.outcome.bad_words,
            "first_bad": first.as_json() if first else None,
            "seconds": round(self.outcome.seconds, 3),
        }


def run_control(runner: Runner, config: RunConfig, progress: Progress) -> Control:
    """Runs `late-copy` where and as `config` will run, until the first wrong word.

    A wrong protocol may also lose words, and then hang before anything was compared, or its first wrong word may be one
    that a rank sent too early: it gets another try.
    """
    for attempt in range(CONTROL_ATTEMPTS):
        control = config.but(
            protocol=PROTOCOL,
            seed=(config.seed + attempt) % (1 << 64),
            replays=CONTROL_REPLAYS,
            duration_s=CONTROL_SECONDS,
            # Ranks of a wrong protocol wait in vain: not for long, where they need no time to find each other.
            timeout_s=config.timeout_s if config.world == "peer" else min(config.timeout_s, CONTROL_TIMEOUT_S),
            stop_on_bad=True,
        )
        result = Control(runner.run(control, progress))
        saw_nothing = result.outcome.hang is None and not result.outcome.bad_words
        if saw_nothing or result.failed_as_it_must:
            break
    return result
